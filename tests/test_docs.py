"""The documentation: its code runs or says why not, its commands parse, its links lead somewhere, and it builds."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

from l2lopt import optimisers
from l2lopt.cli import app
from l2lopt.evaluation.suites import Suite
from l2lopt.experiments import comparison_study, config
from l2lopt.experiments.comparison_jobs import Study
from l2lopt.experiments.config import Config, TrainConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "_build" not in path.parts)
NOTEBOOKS = [page for page in PAGES if "{code-cell}" in (DOCS / page).read_text(encoding="utf-8")]
GUIDES = [page for page in PAGES if page not in NOTEBOOKS]
NOT_RUN = "not run: "
KINDS = {"meta-train": Config, "train": TrainConfig, "suite": Suite, "study": Study}
"""What a block of TOML is, as its fence says → the settings that it has to be."""
VERBS = {"meta-train": Config, "train": TrainConfig}


def fences(text):
    """(language, the rest of the fence's line, code) of each fenced block, directives left out."""
    found = re.findall(r"^(`{3,})([^\n`]*)\n(.*?)^\1 *$", text, re.S | re.M)
    for _, info, code in found:
        language, _, rest = info.strip().partition(" ")
        if not language.startswith("{"):
            yield language, rest.strip(), code


def blocks(page, language):
    """(the rest of the fence's line, code) of a page's blocks in one language."""
    return [block[1:] for block in fences((DOCS / page).read_text(encoding="utf-8")) if block[0] == language]


def commands(code):
    """The command lines of a block of shell that call `l2lopt`, as lists of words from there on."""
    for line in code.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if "l2lopt" in words and words[0] not in ("pip", "export"):
                yield words[words.index("l2lopt") + 1 :]


def check_command(words):
    """Parses a command by the command line's own parser; the config that it names must exist and take its changes.

    Raises:
        click.exceptions.UsageError: For an unknown verb or option.
        UserError: For a config that is not there, or that a change does not fit.
    """
    group = typer.main.get_command(app)
    verb = group.commands[words[0]]
    given = verb.make_context(words[0], words[1:]).params
    changes = given.get("changes") or []
    source = Path(given.get("config", ""))  # text in older releases of typer
    if words[0] in VERBS and source.parts[0] == "configs":
        config.load(config.shipped(str(source.relative_to("configs"))), changes, kind=VERBS[words[0]])
    if words[0] == "reproduce":
        comparison_study.load(given["study"])
    if words[0] == "benchmark":
        assert config.find(given["suite"] or "smoke", "suites", "suite").exists()


def check_commands(code):
    """Parses the commands of a block of shell; the runs that they name are made in the current folder."""
    for words in commands(code):
        for run in words[1:]:
            if run.startswith("runs/"):  # which an earlier command would have left
                Path(run).mkdir(parents=True, exist_ok=True)
        with patch.dict(os.environ):  # `--data` puts its folder there
            check_command(words)


@pytest.mark.parametrize("page", GUIDES)
def test_every_block_is_run_or_says_why_not(page):
    for language, rest, code in fences((DOCS / page).read_text(encoding="utf-8")):
        if rest.startswith(NOT_RUN):
            assert len(rest.removeprefix(NOT_RUN).split()) >= 3, f"a reason is due: {code}"
        elif language == "toml":
            assert rest in KINDS, f"say which settings it is, one of {', '.join(KINDS)}: {code}"
        else:
            assert (language, rest) in {("python", ""), ("bash", "run")}, f"{language} {rest}: {code}"


@pytest.mark.parametrize("page", GUIDES)
def test_commands_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _, code in blocks(page, "bash"):
        check_commands(code)


@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "toml")])
def test_configs_are_right(page):
    for kind, code in blocks(page, "toml"):
        settings = KINDS[kind].model_validate(tomllib.loads(code))
        assert settings.model_dump()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if blocks(page, "python")])
def test_the_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    for rest, code in blocks(page, "python"):
        if not rest:
            exec(compile(code, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if ("run",) in [b[:1] for b in blocks(page, "bash")]])
def test_the_commands_run(page, tmp_path):
    for rest, code in blocks(page, "bash"):
        for words in commands(code) if rest == "run" else ():
            command = [sys.executable, "-m", "l2lopt", *words]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 0, done.stderr


def listed(page):
    """The pages in the tables of contents of a page."""
    folder = Path(page).parent
    for body in re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M):
        for line in body.split("\n"):
            if line.strip() and not line.startswith(":"):
                yield (folder / f"{line.strip()}.md").as_posix()


def test_every_page_is_in_one_table_of_contents():
    found = [below for page in PAGES for below in listed(page)]
    assert sorted([*found, "index.md"]) == PAGES


def test_every_package_has_a_page_of_its_api():
    from test_floors import FLOORS

    described = " ".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES if page.startswith("api/"))
    for unit in FLOORS:
        assert f"{{modules}} {unit}\n" in described or unit == "l2lopt.__main__"


def without_code(text):
    """Prose: fenced blocks that are no directives, and code in backticks, left out."""
    text = re.sub(r"^```(?!\{)[^\n]*\n.*?^```", "", text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path):
    """The names by which links find the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page):
    """The links and included files of a page that lead nowhere."""
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"^```\{include\} (\S+)", text, re.M):
        if not (path.parent / target).is_file():
            yield target
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        file, _, anchor = target.partition("#")
        if file.startswith(("http://", "https://")):
            continue
        place = (path.parent / file).resolve() if file else path
        included = (
            re.search(r"^```\{include\} (\S+)", place.read_text(encoding="utf-8"), re.M)
            if place.is_file() and (place.suffix == ".md")
            else None
        )
        known = anchors(place.parent / included[1]) if included and anchor else set()
        if not place.is_file() or (anchor and anchor not in anchors(place) | known):
            yield target


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", NOTEBOOKS)
def test_a_tutorial_installs_itself_and_opens_in_colab(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    cells = re.findall(r"^```\{code-cell\}\n(.*?)^```", text, re.S | re.M)
    assert text.index("{colab}") < text.index("{code-cell}")
    assert "%pip install" in cells[0]
    assert "%pip" not in "".join(cells[1:])


def test_there_are_eight_tutorials():
    assert len(NOTEBOOKS) == 8


def test_checkers_find_what_is_wrong():
    assert list(fences("```python not run: x\n1\n```\n```{note}\nx\n```\n")) == [("python", "not run: x", "1\n")]
    assert list(commands("torchrun -m -- l2lopt plot runs/a  # a\nls\n")) == [["plot", "runs/a"]]
    assert list(commands("pip install uv && uv run l2lopt demo  # all\npip install l2lopt\n")) == [["demo"]]
    with pytest.raises(Exception, match="No such option"):
        check_command(["train", "configs/digits-train.toml", "--sett", "a=1"])
    with pytest.raises(Exception, match=r"train\.step"):
        check_command(["train", "configs/digits-train.toml", "--set", "train.stepss=1"])


@pytest.fixture
def extension(monkeypatch):
    """Imports an extension of the documentation's build. Needs the group `docs`."""
    for name in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(DOCS / "extensions")
    return importlib.import_module


def test_the_picture_has_every_package(extension):
    from test_floors import FLOORS

    picture = extension("floors_picture")
    drawn = picture.picture(lambda unit: f"{unit}.html")
    assert picture.floors() == FLOORS
    assert all(f">{unit}</text>" in drawn for unit in FLOORS)


def test_the_tables_have_every_key_and_choice(extension):
    tables = extension("settings_tables")
    for prefix, model in tables.groups(Config):
        text = "\n".join(tables.settings_table(model, prefix))
        inner = [name for name, field in model.model_fields.items() if f"`{prefix}{name}`" not in text]
        assert all(hasattr(model.model_fields[name].annotation, "model_fields") for name in inner)
    for name, entry in optimisers.OPTIMISERS.items():
        assert not re.search(r"None|True|False|<", tables.options(entry)), name
    assert tables.kind_of(int | None) == "integer"
    assert tables.toml({"a": [1, True, "x"]}) == '{a = [1, true, "x"]}'


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("[*batch, n] of update_ and |x|.", r"[\*batch, n] of update\_ and \|x\|."),
        ("Some `Layer`s and a `b*c`.", r"Some `Layer`\ s and a ``b*c``."),
        ("θ_{t+1} = θ_t + u_t", "θ_{t+1} = θ_t + u_t"),
    ],
)
def test_prose_of_docstrings_is_protected(written, read, extension):
    assert extension("house_docstrings").protected(written) == read


def test_results_are_sections_whose_levels_follow_one_another(extension):
    results = extension("reference_results")
    folder = results.FOLDER / "fig3-width16"
    lines = "\n".join(results.section(folder, "../")).split("\n")
    levels = [len(line) - len(line.lstrip("#")) for line in lines if line.startswith("#")]
    assert levels[:2] == [2, 3]
    assert set(levels) == {2, 3}
    table = (folder / "table.md").read_text(encoding="utf-8").partition("\n")[0]
    assert lines.index(table) < lines.index("### What it found")
    assert results.demoted("# a\n```bash\n# b\n```\n", 2) == "### a\n```bash\n# b\n```\n"


def test_indices_stand_beside_accented_letters(extension):
    found = re.sub(r"\s", "", extension("mathml").converted(r"\bar s_t \sum_i^n x", as_block=True))
    assert '<msub><moveraccent="true"><mi>s</mi>' in found
    assert found.count("<munderover>") == 1


def test_notebooks_stand_alone(extension):
    text = "```{colab}\n```\n[a](b.md) [c](../guides/d.md#e) [f](https://g.org)"
    found = extension("colab").for_colab(text, "https://host/us/it")
    inside = "https://host/us/it/blob/main/docs"
    assert found == f"[a]({inside}/tutorials/b.md) [c]({inside}/guides/d.md#e) [f](https://g.org)"


def test_formulas_that_would_be_misread_are_refused(extension):
    mathml = extension("mathml")
    assert "<mfrac>" in mathml.converted(r"\frac{1}{2}", as_block=False)
    for tex in (r"\frac12", r"\big(x", r"\underbrace{x}_y"):
        with pytest.raises(Exception, match=re.escape(tex)):
            mathml.converted(tex, as_block=True)


def test_indented_equations_of_docstrings_are_literal(extension):
    lines = [
        "The adjoint:",
        "",
        "    a_t = q_t * b_",
        "",
        "Args:",
        "    *rest: A_ thing.",
        "",
        "Example:",
        "    >>> a_",
        "    b_",
    ]
    found = extension("house_docstrings").rewrite(lines)
    assert found[0] == "The adjoint::"
    assert found[2] == lines[2]
    assert found[5] == r"    *rest: A\_ thing."
    assert found[8:] == lines[8:]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """The tutorials are executed. Needs the group `docs`."""
    for name in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(name)
    command = [sys.executable, "-m", "sphinx", "-n", "-W", "-q", "-d", str(tmp_path / "trees")]
    command += [str(DOCS), str(tmp_path / "html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").exists()
    assert len(list((tmp_path / "html" / "notebooks").glob("*.ipynb"))) == len(NOTEBOOKS)
