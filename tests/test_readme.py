"""The READMEs' Python runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(code, id=f"{path} {number}")
    for path in ("README.md", "l2lopt/cells/README.md")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.S))
]


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS)
def test_a_block_runs(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    exec(compile(code, "README", "exec"), {})


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
