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

from dspark.blas import FETCHED, REMEDY, fetched_dir, open_blas
from dspark.errors import InputError

PACKAGES = ("libopenblas0-pthread", "libgfortran5")
# Only some architectures have it, and there libgfortran needs it.
OPTIONAL_PACKAGES = ("libquadmath0",)
TIMEOUT_S = 300


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Find a BLAS or fetch one; the exit code is 0 unless the user's own `DSPARK_BLAS` is wrong."""
    try:
        found = open_blas()
    except InputError as error:
        say(str(error))
        return error.exit_code
    if found.real or "DSPARK_BLAS" in found.why:
        say(f"BLAS: {found.name} ({found.why})")
        return 0
    if shutil.which("apt-get") and shutil.which("dpkg"):
        say("BLAS: none found; fetching OpenBLAS (8 MB) into the cache folder with apt-get, without root ...")
        if problem := fetch(fetched_dir()):
            say(f"BLAS: could not fetch it ({problem})")
        else:
            say(f"BLAS: openblas (fetched to {fetched_dir()})")
            return 0
    say(f"BLAS: dspark runs without one, but several times slower; {REMEDY}")
    return 0


def fetch(target: Path) -> str | None:
    """Download and unpack the packages into `target`; None when it worked, else why it did not, in a few words."""
    try:
        with tempfile.TemporaryDirectory(prefix="dspark-blas-") as folder:
            work = Path(folder)
            if problem := _download(work):
                return problem
            for package in sorted(work.glob("*.deb")):
                _run(["dpkg", "-x", str(package), str(work / "root")], work)
            return _collect(work / "root", target)
    except subprocess.SubprocessError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or target}: {error.strerror}"


def _download(work: Path) -> str | None:
    base = ["apt-get", "-q", "-o", "APT::Sandbox::User=root"]
    problem = _run([*base, "download", *PACKAGES], work)
    if problem:
        # The system has no package lists (a container), and only root may fetch them: use lists of our own.
        lists, cache = work / "lists", work / "cache"
        for path in (lists / "partial", cache / "archives" / "partial"):
            path.mkdir(parents=True)
        base += ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
        problem = _run([*base, "update"], work) or _run([*base, "download", *PACKAGES], work)
    if not problem:
        _run([*base, "download", *OPTIONAL_PACKAGES], work)
    return problem


def _run(command: list[str], cwd: Path) -> str | None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E:")]
    return f"{command[0]}: {(errors or lines or ['no reason given'])[-1]}"


def _collect(root: Path, target: Path) -> str | None:
    """Copy the libraries that `open_blas` opens, by the names that it opens, so that `target` is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="blas-", dir=target.parent) as staging:
        for lib in FETCHED:
            if found := sorted(root.rglob(lib)):
                shutil.copy(found[0].resolve(), Path(staging) / lib)
        if not (Path(staging) / FETCHED[-1]).exists():
            return f"the package holds no {FETCHED[-1]}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(staging, target)
    return None


if __name__ == "__main__":
    sys.exit(main())
