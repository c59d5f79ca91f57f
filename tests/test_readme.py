"""The README is short and true: its code runs, its commands, links and paths exist, its figures are in the report."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_docs import anchors, check_commands
from test_results import missing_figures

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = ("README.md", "l2lopt/cells/README.md", "l2lopt/torch_optim/INTEGRATIONS.md")
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
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


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_its_commands_are_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in blocks("README.md", "bash"):
        check_commands(code)


def test_it_has_the_commands_that_check_a_clone():
    for command in ("uv sync", "uv run pytest"):
        assert command in README
        assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_a_package_index_can_follow_its_links():
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", README)
    assert len(links) > 20
    for picture, link in links:
        assert link.startswith("https://"), link
        if link.startswith((REPOSITORY, raw)):
            found = re.fullmatch(
                rf"{raw}/main/()(.*)" if picture else rf"{REPOSITORY}/(blob|tree)/main/([^#]*)#?(.*)", link
            )
            place = ROOT / found[2]
            assert place.is_dir() if found[1] == "tree" else place.is_file(), link
            assert picture or not found[3] or found[3] in anchors(place), link


def test_its_figures_are_those_of_the_report():
    said = re.search(r"<!-- results -->(.*)<!-- end of results -->", README, re.S)[1]
    assert len(re.findall(r"[−+][\d.]+ % \[", said)) >= 5
    assert list(missing_figures(said.replace("\n", " "))) == []


def test_every_path_in_its_tree_is_there():
    folder = ROOT
    for line in re.search(r"```text\n(.*?)```", README, re.S)[1].splitlines():
        parent = folder if line.startswith(" ") else ROOT
        names = re.match(r"\s*([\w./]+(?:, [\w./]+)*)", line)[1].split(", ")
        assert all((parent / name).exists() for name in names), line
        folder = ROOT / names[0] if parent == ROOT else folder


def test_every_path_in_the_map_is_there_and_every_package_in_the_map():
    page = (ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    lines = re.search(r"^## The map\n(.*?)^## ", page, re.S | re.M)[1]
    rows = re.findall(r"^\| `([\w./]+)` \| *(\d?) *\| (.*) \|$", lines, re.M)
    for name, _, holds in rows:
        assert (ROOT / name).exists(), name
        if name.endswith("/"):
            inside = re.findall(r"`(\w+\.(?:py|toml))`", holds)
            assert all((ROOT / name / file).exists() for file in inside), (name, inside)
    named = {name for name, _, _ in rows}
    packages = [path.parent for top in ("l2lopt", "optimisees") for path in (ROOT / top).glob("*/__init__.py")]
    assert {f"{path.relative_to(ROOT)}/" for path in packages} <= named


def test_the_floors_of_the_map_are_the_modules():
    from test_floors import FLOORS

    page = (ROOT / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    for name, floor in re.findall(r"^\| `([\w./]+)` \| (\d) \|", page, re.M):
        unit = name.removesuffix("/").removesuffix(".py").replace("/", ".")
        assert FLOORS[unit] == int(floor), name
