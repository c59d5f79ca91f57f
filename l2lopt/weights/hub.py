"""Learned optimisers on the Hugging Face hub. Needs the extra `hub`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from l2lopt.core.errors import UserError, install
from l2lopt.weights import files
from l2lopt.weights.card import NAME as CARD
from l2lopt.weights.card import model_card

FILE = "optimiser.safetensors"
"""Name of the file in a repository of the hub."""


def push(
    weights: str | Path, repo: str, *, private: bool = False, token: str | None = None, card: str | None = None
) -> str:
    """Uploads a learned optimiser and its model card to a repository of the hub, in one commit.

    The card, `README.md`, takes the place of an earlier one.

    Example:
        >>> import l2lopt
        >>> l2lopt.push("runs/mine/optimiser.safetensors", "ada/my-optimiser")  # doctest: +SKIP
        'https://huggingface.co/ada/my-optimiser/commit/…'

    Args:
        weights: File written by `save`, or a name in `list_weights()`.
        repo: Repository, "owner/name"; it is made if need be.
        private: Whether a repository that is made is private.
        token: Access token; None takes that of the hub's own login.
        card: Text of the card; None takes that of `weights.card.model_card`.

    Returns:
        The address of the commit.

    Raises:
        UserError: If the extra is not installed, the file is no learned optimiser, or the hub refuses.
    """
    path = files.find(weights)
    files.load(path)  # raises for a file that others could not load either
    contents = {FILE: path, CARD: (model_card(weights, repo) if card is None else card).encode()}
    with _hub(repo) as hub:
        api = hub.HfApi(token=token)
        api.create_repo(repo, private=private, exist_ok=True)
        added = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=one) for name, one in contents.items()]
        return str(api.create_commit(repo, added, commit_message=f"Upload {path.name} with l2lopt").commit_url)


def pull(repo: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Downloads a learned optimiser from a repository of the hub, or finds it in the hub's cache.

    Example:
        >>> import l2lopt
        >>> path = l2lopt.pull("ada/my-optimiser")  # doctest: +SKIP
        >>> optimiser = l2lopt.load(path)  # doctest: +SKIP

    Args:
        repo: Repository, "owner/name".
        revision: Branch, tag or commit; None takes the newest.
        token: Access token; None takes that of the hub's own login.

    Returns:
        The path of the file in the cache.

    Raises:
        UserError: If the extra is not installed, the repository is missing or out of reach, or its file is foreign.
    """
    with _hub(repo) as hub:
        path = Path(hub.HfApi(token=token).hf_hub_download(repo, FILE, revision=revision))
    # Loaded once here, so that a foreign file is refused now and not when it is used.
    files.load(path)
    return path


@contextmanager
def _hub(repo: str) -> Iterator[Any]:
    """The hub's package; its errors become a `UserError` of one line."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        remedy = install("hub")
        raise UserError("hub", expected="the package huggingface_hub", found="none", remedy=remedy) from None
    try:
        yield huggingface_hub
    except Exception as error:
        # The connection's own errors are those of the package that the hub's uses: httpx today, requests before.
        foreign = type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests", "urllib3")
        own = HfHubHTTPError | HFValidationError | LocalEntryNotFoundError | OSError
        if not foreign and not isinstance(error, own):
            raise
        expected, remedy = f"a repository of the hub with {FILE}", "check name, token and connection"
        raise UserError(repo, expected=expected, found=str(error), remedy=remedy) from None
