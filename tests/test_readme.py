"""The READMEs' Python runs as it stands, the blocks of one file one after another."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("README.md", "l2lopt/cells/README.md")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_blocks_run(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    names = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.S):
        exec(compile(code, file, "exec"), names)


def test_every_path_in_the_map_is_there():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    folder = ROOT
    for line in re.search(r"```text\n(.*?)```", text, re.S)[1].splitlines():
        parent = folder if line.startswith(" ") else ROOT
        names = re.match(r"\s*([\w./]+(?:, [\w./]+)*)", line)[1].split(", ")
        assert all((parent / name).exists() for name in names), line
        if names[0].endswith("/"):
            inside = re.findall(r"[\w]+\.(?:py|toml)\b", line)
            assert all((parent / names[0] / name).exists() for name in inside), line
        folder = ROOT / names[0] if parent == ROOT else folder
