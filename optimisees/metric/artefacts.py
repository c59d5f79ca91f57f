"""The embeddings of test windows, written for TensorBoard's projector."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from l2lopt.storage.run_log import write_text
from optimisees.data.har import Windows

FILES = ("projector_config.pbtxt", "embedding.tsv", "embedding-labels.tsv")


def write_embeddings(points: Tensor, windows: Windows, folder: Path) -> None:
    """Writes the windows' embeddings [n, size] with their activities and subjects; see `write_projector`."""
    columns = {
        "activity": [windows.activities[label] for label in windows.labels.tolist()],
        "subject": list(map(str, windows.subjects.tolist())),
    }
    write_projector(folder, points.tolist(), columns)


def write_projector(folder: Path, points: Sequence[Sequence[float]], columns: Mapping[str, Sequence[str]]) -> None:
    """Writes points with labels for TensorBoard's embedding projector, in a folder where it looks for runs.

    Args:
        folder: Folder that gets `embedding.tsv`, `embedding-labels.tsv` and `projector_config.pbtxt`.
        points: Coordinates of n points, [n][size].
        columns: Labels by name, n each. TensorBoard shows no header for a single column, so give two or more.
    """
    rows = ["\t".join(columns), *("\t".join(row) for row in zip(*columns.values(), strict=True))]
    write_text(folder / "embedding.tsv", "".join("\t".join(f"{x:.6g}" for x in point) + "\n" for point in points))
    write_text(folder / "embedding-labels.tsv", "".join(f"{row}\n" for row in rows))
    paths = 'tensor_path: "embedding.tsv" metadata_path: "embedding-labels.tsv"'
    write_text(folder / "projector_config.pbtxt", f'embeddings {{ tensor_name: "embedding" {paths} }}\n')
