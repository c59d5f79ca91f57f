"""The READMEs' Python runs as it stands, the blocks of one file one after another."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("README.md", "l2lopt/cells/README.md", "l2lopt/torch_optim/INTEGRATIONS.md")
LIGHTNINGS = [  # its own use of what others have deprecated
    r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning",
]


def blocks(file, kind="python"):
    """The code of one kind in a page."""
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.filterwarnings(*LIGHTNINGS)
def test_the_blocks_run(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    names = {}
    for code in blocks(file):
        if "accelerate" in sys.modules:  # which the trainer has set up in its own way
            sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
        exec(compile(code, file, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("l2lopt/torch_optim/INTEGRATIONS.md", "python torchrun"))
def test_the_blocks_for_two_processes_run(code, tmp_path):
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


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
