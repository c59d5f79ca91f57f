"""Tables as CSV, which people open in other programs."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from l2lopt.core.errors import UserError
from l2lopt.storage.run_log import read_text


def read_lines(path: Path, columns: Sequence[str], what: str, remedy: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The lines of a table under its head, each with its place for an error.

    Args:
        path: File.
        columns: Names of its columns, in their order.
        what: Description of the file for the error, such as "an evaluation".
        remedy: Advice for the error.

    Raises:
        UserError: For a missing or unreadable file, other columns, or a line that is no CSV (with its number).
    """
    # The quotes of a field may hold the ends of lines, which are not to be changed.
    lines = csv.DictReader(io.StringIO(read_text(path, what, remedy), newline=""))
    try:
        if tuple(lines.fieldnames or ()) != tuple(columns):
            found = ",".join(lines.fieldnames or ()) or "an empty file"
            raise UserError(str(path), expected=f"columns {','.join(columns)}", found=found, remedy=remedy)
        for line in lines:
            yield f"{path}, line {lines.line_num}", line
    except csv.Error as error:  # a quote that nothing closes takes up all that is behind it
        where = f"{path}, line {lines.line_num}"
        raise UserError(where, expected="a line of a table", found=str(error), remedy=remedy) from None
