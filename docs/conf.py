"""Configuration of the documentation's build, `python -m sphinx -n -W docs docs/_build/html`.

With L2LOPT_DOCS_ONLINE=1 the names of other projects become links, by inventories that are fetched; without it the
build needs no network.
"""

import os
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE / "extensions"), str(ROOT)]

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "l2lopt"
author = "the l2lopt project"
project_copyright = author
release = version = _PROJECT["version"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "house_docstrings",
    "package_modules",
    "settings_tables",
    "floors_picture",
    "reference_results",
    "colab",
    "mathml",
]
exclude_patterns = ["_build", "extensions"]
html_theme = "furo"
html_title = f"l2lopt {release}"
html_static_path = ["_static"]
html_css_files = ["house.css"]

try:
    import sphinx_copybutton
except ImportError:  # a convenience of the reader's, without which the pages are the same
    pass
else:
    extensions.append(sphinx_copybutton.__name__)
    copybutton_prompt_text = r">>> |\.\.\. |\$ "
    copybutton_prompt_is_regexp = True
    copybutton_exclude = ".linenos, .gp, .go"

# Markdown, and notebooks in it.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath", "substitution"]
myst_heading_anchors = 3
html_math_renderer = "mathml"
nb_execution_mode = os.environ.get("L2LOPT_DOCS_NOTEBOOKS", "cache")
nb_execution_timeout = 300  # seconds of a cell, beside other jobs
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors, and a build that is the same everywhere

# The API, from docstrings.
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_mock_imports = [] if find_spec("triton") else ["triton"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "py:obj"

# Before autodoc imports anything: it imports with TYPE_CHECKING on, and pydantic would then build its models from what
# is for type checkers alone.
if not autodoc_mock_imports:
    from package_modules import modules

    for _name in (*modules("l2lopt"), *modules("optimisees")):
        import_module(_name)

# What a signature says that has no page: an alias of types, which autodoc names as it is written, and pydantic's word
# for a setting that must be given.
nitpick_ignore = [("py:class", "Rate"), ("py:class", "PydanticUndefined"), ("py:class", "P")]

colab_repository = _PROJECT.get("urls", {}).get("Repository", "https://github.com/l2lopt/l2lopt")

# Names of other projects. Links to them need their inventories; offline they are left as text, and `-n` is asked to
# overlook them, and nothing else.
if os.environ.get("L2LOPT_DOCS_ONLINE") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "pydantic": ("https://docs.pydantic.dev/latest", None),
        "matplotlib": ("https://matplotlib.org/stable", None),
    }
