"""Reading TOML files that users write."""

import tomllib
from pathlib import Path
from typing import Any

from l2lopt.core.errors import UserError
from l2lopt.storage.run_log import existing


def read_toml(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        path: File to read.
        what: Description of the file for the error, such as "a config file".
        remedy: Advice for a missing file.

    Raises:
        UserError: For a missing file, or one that is not TOML in UTF-8.
    """
    existing(path, what, remedy)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(str(path), expected="a TOML file", found=str(error), remedy="mend that place") from None
