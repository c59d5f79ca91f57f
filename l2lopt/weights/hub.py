"""Learned optimisers on the Hugging Face hub. Needs the extra: `pip install "l2lopt[hub]"`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from l2lopt.core.errors import UserError
from l2lopt.weights import files

FILE = "optimiser.safetensors"
"""Its name in a repository of the hub."""


def push(weights: str | Path, repo: str, *, private: bool = False, token: str | None = None) -> str:
    """Puts a learned optimiser into a repository of the hub, which is made if need be, and gives the commit's address.

    Args:
        weights: a file written by `save`, or a name in `list_weights()`.
        repo: "owner/name".
        private: whether a repository that is made is private.
        token: of the hub; by default the one that is logged in.

    Raises:
        UserError: without the extra, for a file that is no learned optimiser, or a refusal of the hub.
    """
    path = files.find(weights)
    files.load(path)  # what cannot be loaded is not handed on
    with _hub(repo) as hub:
        api = hub.HfApi(token=token)
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_file(path_or_fileobj=path, path_in_repo=FILE, repo_id=repo))


def pull(repo: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """The file of a learned optimiser in a repository of the hub, from the hub's cache where it is there already.

    Args:
        repo: "owner/name".
        revision: a branch, a tag or a commit; by default the newest.
        token: of the hub; by default the one that is logged in.

    Raises:
        UserError: without the extra, for a repository that is missing or cannot be reached, or a foreign file.
    """
    with _hub(repo) as hub:
        path = Path(hub.HfApi(token=token).hf_hub_download(repo, FILE, revision=revision))
    files.load(path)
    return path


@contextmanager
def _hub(repo: str) -> Iterator[Any]:
    """The hub's package, its refusals turned into one line."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        remedy = 'pip install "l2lopt[hub]"'
        raise UserError("hub", expected="the package huggingface_hub", found="none", remedy=remedy) from None
    try:
        yield huggingface_hub
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        expected, remedy = f"a repository of the hub with {FILE}", "check name, token and connection"
        raise UserError(repo, expected=expected, found=str(error), remedy=remedy) from None
