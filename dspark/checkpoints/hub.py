"""Fetch weights from the Hugging Face hub: only files that are needed and safe, and one sentence when it cannot be.

`huggingface_hub` keeps, resumes and shares the files; gated repositories need its login (`hf auth login`, `HF_TOKEN`).
`HF_ENDPOINT` names another server. Nothing here can run code: no Python file and no pickle is ever fetched.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dspark.checkpoints.progress import Progress, Report
from dspark.errors import SourceError

CONFIG_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.jsonl", "tokenizer.model", "*.tiktoken")
MODEL_PATTERNS = (*CONFIG_PATTERNS, "model*.safetensors", "adapters.safetensors")
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
T = TypeVar("T")


def hub_snapshot(
    repo: str,
    revision: str | None = None,
    *,
    patterns: Sequence[str] = MODEL_PATTERNS,
    progress: Report | None = None,
) -> Path:
    """The folder with this repository's files that match `patterns`, fetched as far as they are not here yet."""
    from huggingface_hub import snapshot_download

    return Path(
        ask(
            repo,
            revision,
            lambda: snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                endpoint=endpoint(),
                tqdm_class=_bars(repo, progress),
            ),
        )
    )


def hub_file(repo: str, path: str, revision: str | None = None, *, progress: Report | None = None) -> Path:
    """One file of a repository, fetched unless it is here."""
    from huggingface_hub import hf_hub_download

    bars = _bars(f"{repo}/{path}", progress)
    return Path(
        ask(
            f"{repo}/{path}",
            revision,
            lambda: hf_hub_download(repo, path, revision=revision, endpoint=endpoint(), tqdm_class=bars),
        )
    )


def hub_cached(repo: str, revision: str | None = None, *, file: str | None = None) -> Path | None:
    """The folder (or `file`) of a repository in the hub's cache, when its weights are whole; asks no network."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    if file is not None:
        found = try_to_load_from_cache(repo, file, revision=revision)
        return Path(found) if isinstance(found, str) else None
    try:
        patterns: list[str] = list(MODEL_PATTERNS)
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True))
    except (OSError, ValueError):
        return None
    # The config alone is there when a family was refused before its weights were fetched.
    return folder if any(folder.glob("*.safetensors")) else None


def endpoint() -> str | None:
    """The hub's server where it is not huggingface.co."""
    # Read when asked, since huggingface_hub reads it once at its import.
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def ask(what: str, revision: str | None, fetch: Callable[[], T]) -> T:
    """What `fetch` gives; whatever it raises becomes a SourceError of one sentence about `what`."""
    try:
        return fetch()
    except Exception as error:  # the network, the disk and the library each have their own; all end in one sentence
        raise SourceError(f"{what}{f'@{revision}' if revision else ''}: {_sentence(what, error)}") from error


def _sentence(what: str, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        # The hub did answer; that nothing was cached either is not the reason.
        error = error.__cause__
    repo = "/".join(what.split("/")[:2])
    page = f"{endpoint() or 'https://huggingface.co'}/{repo}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"the repository is gated; accept its terms at {page}, then run `hf auth login` (or set HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "there is no such repository, or it is private; check the name, and for a private one run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no such revision; {page}/commits/main lists them"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"the repository has no such file; {page}/tree/main lists them"
    if isinstance(error, errors.HFValidationError):
        return "no valid repository name; one is written user/name"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return f"it is not on this disk and {_unreachable()}"
    if status == 429:
        return "the hub asks to wait (too many requests); try again in some minutes, or log in with `hf auth login`"
    if status in (401, 403):
        return f"the hub refuses access ({status}); run `hf auth login` with a token that may read {page}"
    if status is not None:
        return f"the hub answers with an error ({status}); try again later"
    if isinstance(error, OSError) and error.errno is not None:
        return f"its files cannot be written: {error.strerror}; free some space or set HF_HOME to another disk"
    if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
        return f"the download broke off ({type(error).__name__}) and {_unreachable()}"
    return f"cannot be fetched: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _unreachable() -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE keeps it from being fetched; unset it, or name a local folder"
    return (
        f"{endpoint() or 'huggingface.co'} cannot be reached; check the network (a broken download is resumed), or "
        "name a local folder"
    )


def _bars(what: str, progress: Report | None) -> Any:
    """A tqdm class that reports bytes to `progress`; None keeps huggingface_hub's own bars."""
    if progress is None:
        return None
    from tqdm.std import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            # Of two bars over the same bytes, the network's would count compressed ones; files are a bar of their own.
            self._counts = kwargs.get("unit") == "B" and not str(kwargs.get("desc")).startswith("Downloading bytes")
            super().__init__(*args, **(kwargs | {"disable": False, "file": io.StringIO()}))

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self._counts and (self.n or self.total):
                progress(Progress(what, int(self.n), int(self.total) if self.total else None))

        def clear(self, nolock: bool = False) -> None:
            """Draws nothing, so there is nothing to clear."""

    return Bar
