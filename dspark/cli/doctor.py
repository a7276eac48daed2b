"""`dspark doctor`: is everything here that a run needs? One line a check, and what to do where it is not."""

from __future__ import annotations

import os
import platform as python_platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from dspark import __version__
from dspark.blas import open_blas
from dspark.cache import cache_dir
from dspark.cli.screen import Answer
from dspark.errors import DsparkError

NEEDED = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "huggingface-hub", "numpy", "attrs", "cattrs", "rich", "typer")
SMALL_MEMORY = 2e9
SMALL_DISK = 2e9


class Check(NamedTuple):
    """`state`: "ok", "warn" (a run works, less well) or "fail" (it does not); `remedy`: what to do, or nothing."""

    state: str
    name: str
    text: str
    remedy: str = ""


def doctor() -> int:
    """Print every check as it is made. 0 when none failed, else 1."""
    answer, failed = Answer(), False
    for check in checks():
        remedy = f"; {check.remedy}" if check.remedy else ""
        answer.write(f"{check.state:<5} {check.name:<9} {check.text}{remedy}\n")
        failed = failed or check.state == "fail"
    verdict = (
        "a run will not work until what failed is mended" if failed else "a run will work: dspark run smollm2-135m 'Hi'"
    )
    answer.write(f"\n{verdict}\n")
    return int(failed)


def checks() -> Iterator[Check]:
    """All checks, the ones that others rest on first. None raises."""
    for check in (python, packages, blas, device, works, kernels, memory, hub, cache, recipes):
        yield _guarded(check)


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except DsparkError as error:
        return Check("fail", check.__name__, str(error))
    except Exception as error:  # a check that breaks is a finding, and the others still matter
        return Check(
            "fail", check.__name__, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )


def python() -> Check:
    text = f"dspark {__version__}, Python {python_platform.python_version()}, {python_platform.platform(terse=True)}"
    return Check("ok", "python", text)


def packages() -> Check:
    found, missing = [], []
    for name in NEEDED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("fail", "packages", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check("ok", "packages", ", ".join(found[:4]))


def blas() -> Check:
    found = open_blas()
    if found.real:
        return Check("ok", "BLAS", f"{found.name} ({found.why})")
    from dspark.platform import backend

    state = "warn" if backend() == "cpu" else "ok"
    return Check(state, "BLAS", found.why)


def device() -> Check:
    open_blas()
    from dspark.platform import machine, size_text

    here = machine()
    text = f"{here.backend}: {here.chip}, {here.cores} cores, {size_text(here.memory_bytes)} for weights and caches"
    if here.backend == "cpu" and sys.platform == "darwin":
        return Check("warn", "device", text, "this Mac's GPU is not used; MLX needs Apple silicon and macOS 14")
    if here.backend == "cpu" and Path("/proc/driver/nvidia/version").exists():
        return Check("warn", "device", text, "an NVIDIA GPU is here and not used; pip install 'dspark[cuda]'")
    return Check("ok", "device", text)


def works() -> Check:
    """A small product on the default device, and its answer."""
    import mlx.core as mx

    total = (mx.ones((8, 16)) @ mx.ones((16, 4))).sum().item()
    if total != 512:
        return Check(
            "fail", "computing", f"a product of ones gives {total}, not 512", "reinstall mlx for this platform"
        )
    return Check("ok", "computing", "a small product is right")


def kernels() -> Check:
    """How many shapes of quantised products this machine does by other kernels than MLX's own."""
    from dspark.platform import backend

    if backend() == "cpu":
        return Check("ok", "kernels", "MLX's own; there are others for GPUs only")
    from dspark.kernels import store

    found = store.read()
    if not found:
        return Check("ok", "kernels", "MLX's own; the first run of a quantised model measures others")
    counts = Counter(finding.way for finding in found.values())
    words = ", ".join(f"{n} {way}" for way, n in sorted(counts.items()))
    return Check("ok", "kernels", f"{len(found)} shapes measured here: {words} ({store.path()})")


def memory() -> Check:
    from dspark.platform import memory_available, size_text

    free = memory_available()
    if free < SMALL_MEMORY:
        return Check("warn", "memory", f"{size_text(free)} free", "close something, or choose a small model")
    return Check("ok", "memory", f"{size_text(free)} free")


def hub() -> Check:
    from huggingface_hub import constants, get_token

    state = (
        "offline (HF_HUB_OFFLINE): only what is cached"
        if constants.HF_HUB_OFFLINE
        else "online, if it answers (not checked)"
    )
    login = "logged in" if get_token() else "not logged in, which only gated repositories need"
    folder = Path(constants.HF_HUB_CACHE)
    problem = _unwritable(folder)
    if problem:
        return Check("warn", "hub", f"{folder}: {problem}", "set HF_HOME to a folder that can be written")
    return Check("ok", "hub", f"{state}; {login}; {_room(folder)} in {folder}")


def cache() -> Check:
    folder = cache_dir()
    if problem := _unwritable(folder):
        return Check("warn", "cache", f"{folder}: {problem}", "set DSPARK_CACHE to a folder that can be written")
    if shutil.disk_usage(_existing(folder)).free < SMALL_DISK:
        return Check(
            "warn", "cache", f"{_room(folder)} in {folder}", "free some space, or set DSPARK_CACHE to another disk"
        )
    return Check("ok", "cache", f"{_room(folder)} in {folder}")


def recipes() -> Check:
    from dspark.recipe import load, shipped

    names = []
    for name, path in shipped():
        load(path)
        names.append(name)
    if not names:
        return Check("fail", "recipes", "none are shipped", "reinstall dspark")
    return Check("ok", "recipes", ", ".join(names))


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _unwritable(folder: Path) -> str:
    place = _existing(folder)
    if not place.is_dir():
        return f"{place} is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else "cannot be written"


def _room(folder: Path) -> str:
    from dspark.platform import size_text

    return f"{size_text(shutil.disk_usage(_existing(folder)).free)} free"
