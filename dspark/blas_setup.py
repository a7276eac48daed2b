"""`python -m dspark.blas_setup`: see to a real BLAS on Linux without root, from the distribution's own packages.

The packages are downloaded with apt-get and unpacked with dpkg into the user's cache folder; nothing is installed and
the system is not changed. Where that cannot be done it says once what to install, and ends with 0: a run works without.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from dspark.blas import FETCHED, FETCHED_BLIS, REMEDY, blis_dir, fetched_dir, open_blas, suits_blis
from dspark.errors import InputError

TIMEOUT_S = 300


class Library(NamedTuple):
    """A BLAS to fetch: its packages, those that only some architectures have, its files (the last one is the BLAS), where to."""

    name: str
    packages: tuple[str, ...]
    optional: tuple[str, ...]
    files: tuple[str, ...]
    target: Path


def libraries() -> list[Library]:
    """What to try to fetch, the best first."""
    openblas = Library("openblas", ("libopenblas0-pthread", "libgfortran5"), ("libquadmath0",), FETCHED, fetched_dir())
    blis = Library("blis", ("libblis4-openmp", "libgomp1"), (), FETCHED_BLIS, blis_dir())
    return [blis, openblas] if suits_blis() else [openblas]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Find a BLAS or fetch one; the exit code is 0 unless the user's own `DSPARK_BLAS` is wrong."""
    try:
        found = open_blas()
    except InputError as error:
        say(str(error))
        return error.exit_code
    wanted = libraries() if "DSPARK_BLAS" not in found.why and sys.platform.startswith("linux") else []
    if found.real:
        # Only what comes before it is worth fetching.
        names = [library.name for library in wanted]
        wanted = wanted[: names.index(found.name)] if found.name in names else []
    if wanted and not (shutil.which("apt-get") and shutil.which("dpkg")):
        wanted = []
    for library in wanted:
        say(f"BLAS: fetching {library.name} (some MB) into the cache folder with apt-get, without root ...")
        problem = fetch(library)
        if not problem:
            say(f"BLAS: {library.name} (fetched to {library.target})")
            return 0
        say(f"BLAS: could not fetch it ({problem})")
    if found.real or "DSPARK_BLAS" in found.why:
        say(f"BLAS: {found.name} ({found.why})")
    else:
        say(f"BLAS: dspark runs without one, but several times slower; {REMEDY}")
    return 0


def fetch(library: Library) -> str | None:
    """Download and unpack the packages into the target; None when it worked, else why it did not, in a few words."""
    try:
        with tempfile.TemporaryDirectory(prefix="dspark-blas-") as folder:
            work = Path(folder)
            if problem := _download(library, work):
                return problem
            for package in sorted(work.glob("*.deb")):
                _run(["dpkg", "-x", str(package), str(work / "root")], work)
            return _collect(library, work / "root")
    except subprocess.SubprocessError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or library.target}: {error.strerror}"


def _download(library: Library, work: Path) -> str | None:
    base = ["apt-get", "-q", "-o", "APT::Sandbox::User=root"]
    problem = _run([*base, "download", *library.packages], work)
    if problem:
        # The system has no package lists (a container), and only root may fetch them: use lists of our own.
        lists, cache = work / "lists", work / "cache"
        for path in (lists / "partial", cache / "archives" / "partial"):
            path.mkdir(parents=True)
        base += ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
        problem = _run([*base, "update"], work) or _run([*base, "download", *library.packages], work)
    if not problem:
        for package in library.optional:
            _run([*base, "download", package], work)
    return problem


def _run(command: list[str], cwd: Path) -> str | None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E:")]
    return f"{command[0]}: {(errors or lines or ['no reason given'])[-1]}"


def _collect(library: Library, root: Path) -> str | None:
    """Copy the files that `open_blas` opens, by the names that it opens, so that the target is whole or absent."""
    target = library.target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="blas-", dir=target.parent) as staging:
        for name in library.files:
            if found := sorted(root.rglob(name)):
                shutil.copy(found[0].resolve(), Path(staging) / name)
        if not (Path(staging) / library.files[-1]).exists():
            return f"the package holds no {library.files[-1]}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(staging, target)
    return None


if __name__ == "__main__":
    sys.exit(main())
