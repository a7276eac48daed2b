"""A repository's headers without its weights: enough to say what a drafter is.

The repository becomes a folder for as long as it is looked at: config files whole, weight files of their true size of which
only the header was fetched (a range of bytes); the rest is a hole that no disk space is spent on. So what reads a folder on
this disk reads it, and checks it, alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from dspark.checkpoints.gguf_header import read_header
from dspark.checkpoints.hub import ask, endpoint, hub_file
from dspark.errors import CheckpointError, SourceError

CONFIGS = ("config.json", "model.safetensors.index.json")
# Known by its name alone; never read.
MARKERS = ("mask_embedding.pt",)
FIRST_BYTES = 100_000
MOST_HEADER = 100_000_000
# A GGUF header does not say how long it is; the longest hold a tokenizer.
GGUF_BYTES = (1_000_000, 16_000_000, 64_000_000)


@contextmanager
def hub_headers(repo: str, revision: str | None = None) -> Iterator[Path]:
    """A folder that stands for a hub repository. Raises SourceError, one sentence, where it cannot be had."""
    sizes = _sizes(repo, revision)
    with tempfile.TemporaryDirectory(prefix="dspark-") as made:
        folder = Path(made)
        for name, size in sizes.items():
            if name in CONFIGS:
                (folder / name).write_bytes(hub_file(repo, name, revision).read_bytes())
            elif name in MARKERS:
                (folder / name).touch()
            elif name.endswith(".safetensors") and PurePosixPath(name).name == name:
                _hollow(folder / name, _safetensors_header(repo, name, revision), size)
        yield folder


@contextmanager
def hub_gguf_header(repo: str, name: str, revision: str | None = None) -> Iterator[Path]:
    """A file that stands for one GGUF file of a hub repository."""
    sizes = _sizes(repo, revision)
    if name not in sizes:
        raise SourceError(f"{repo}/{name}: the repository has no such file")
    with tempfile.TemporaryDirectory(prefix="dspark-") as made:
        file = Path(made) / PurePosixPath(name).name
        for count in GGUF_BYTES:
            _hollow(file, _ranged(repo, name, revision, count), sizes[name])
            if _reaches_data(file, count):
                break
        yield file


def _reaches_data(file: Path, count: int) -> bool:
    """Whether the first `count` bytes of a GGUF file hold all of its header."""
    try:
        tensors = read_header(file).tensors.values()
    except CheckpointError:
        return False
    return min((t.offset for t in tensors), default=0) <= count


def _sizes(repo: str, revision: str | None) -> dict[str, int]:
    """The files of a repository, and how many bytes each has."""
    from huggingface_hub import HfApi

    def fetch() -> list[Any]:
        return list(HfApi(endpoint=endpoint()).list_repo_tree(repo, recursive=True, revision=revision or "main"))

    return {entry.path: int(entry.size) for entry in ask(repo, revision, fetch) if hasattr(entry, "size")}


def _hollow(file: Path, head: bytes, size: int) -> None:
    """A file of `size` bytes that begins with `head`."""
    with file.open("wb") as handle:
        handle.write(head[:size])
        handle.truncate(size)


def _safetensors_header(repo: str, name: str, revision: str | None) -> bytes:
    head = _ranged(repo, name, revision, FIRST_BYTES)
    length = int.from_bytes(head[:8], "little") + 8
    # A length that no header has is left to whoever reads the file, which knows the sentence for it.
    return _ranged(repo, name, revision, length) if FIRST_BYTES < length <= MOST_HEADER else head


def _ranged(repo: str, name: str, revision: str | None, count: int) -> bytes:
    """The first `count` bytes of a file, or all of a shorter one."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    def fetch() -> bytes:
        url = hf_hub_url(repo, name, revision=revision, endpoint=endpoint())
        headers, got = {**build_hf_headers(), "Range": f"bytes=0-{count - 1}"}, b""
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=60) as response:
            hf_raise_for_status(response)
            # A server that knows no ranges would send all of it.
            for piece in response.iter_raw():
                got += piece
                if len(got) >= count:
                    break
        return got[:count]

    return ask(f"{repo}/{name}", revision, fetch)
