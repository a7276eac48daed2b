"""Where calibrations are kept: `<folder>/<machine>/<recipe>.toml`, written whole or not at all, by any number of processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import attrs

from dspark.cache import cache_dir
from dspark.calibrate.record import Calibration, Identity, Stale, read, read_asked, write
from dspark.errors import InputError
from dspark.platform import Machine

VARIABLE = "DSPARK_CALIBRATION_CACHE"
LOCK, MEASURING, PART, BROKEN = ".lock", ".measuring", ".part", ".broken"


class Found(NamedTuple):
    """What the store has for a recipe on a machine. note: why there is nothing, or why a file was not used; a sentence for
    the user, None where nothing needs saying."""

    calibration: Calibration | None
    note: str | None = None
    path: Path | None = None


def store_dir() -> Path:
    """`DSPARK_CALIBRATION_CACHE`, else `calibration_cache` of the checkout that this package is in, else the user's cache
    folder. Nothing is created by asking."""
    if chosen := os.environ.get(VARIABLE, "").strip():
        return Path(chosen).expanduser()
    root = Path(__file__).resolve().parents[2]
    if (root / "calibration_cache").is_dir() and (root / "pyproject.toml").is_file():
        return root / "calibration_cache"
    return cache_dir() / "calibration"


@attrs.frozen
class Store:
    """The calibrations in a folder. Files are found by what they hold for: a recipe may be renamed, a model moved."""

    folder: Path = attrs.field(factory=store_dir, converter=Path)

    def load(self, machine: Machine, identity: Identity) -> Found:
        """The calibration of a recipe on a machine. Never raises for what is in the folder: a file that cannot be read is
        set aside as `<name>.broken`, one that no longer holds is left to be written again; `note` says so."""
        path = self._find(machine, identity)
        if path is None:
            return Found(None, self._elsewhere(machine, identity))
        try:
            return Found(read(path.read_text(encoding="utf-8"), machine, identity), None, path)
        except FileNotFoundError:
            return Found(None)
        except Stale as why:
            return Found(None, f"{path}: measured again, because {why}", path)
        except OSError as error:
            return Found(None, f"{path}: cannot be read ({error.strerror}); measured again", path)
        except (InputError, ValueError, RecursionError) as error:
            return self._set_aside(path, machine, identity, str(error).partition("\n")[0])

    def load_asked(self, machine: Machine, asked: str) -> Found:
        """The calibration of a recipe whose target and drafter are named as `asked` digests them and not loaded: for words, not
        for runs. Reads every file of this machine; nothing is set aside."""
        for path in sorted((self.folder / machine.id).glob("*.toml")):
            with contextlib.suppress(Stale, OSError, InputError, ValueError, RecursionError):
                return Found(read_asked(path.read_text(encoding="utf-8"), machine, asked), None, path)
        return Found(None)

    def save(self, calibration: Calibration, machine: Machine, label: str) -> Path:
        """Write a calibration and return its path. `label` is for people: the file's name begins with it.

        The file appears whole, or stays what it was, whenever the process ends. Raises InputError where the folder cannot
        be written to.
        """
        text = write(calibration)
        folder = self.folder / machine.id
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / LOCK):
                # Whoever left a part behind is dead: it would hold the lock.
                for part in folder.glob(f"*{PART}"):
                    part.unlink()
                path = self._find(machine, calibration.identity)
                path = path or folder / f"{_slug(label)}-{calibration.identity.digest}.toml"
                _replace(path, text)
        except OSError as error:
            raise InputError(
                f"{folder}: the calibration cannot be written ({error.strerror}); set {VARIABLE} to a folder of yours"
            ) from None
        return path

    @contextlib.contextmanager
    def measuring(self, machine: Machine, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold this machine for measuring: two at once would disturb one another. `waiting` is called if somebody else
        measures. Look into the store again once inside. Without a folder to write to, nothing is held."""
        folder = self.folder / machine.id
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(_locked(folder / MEASURING, waiting))
            yield

    def _find(self, machine: Machine, identity: Identity) -> Path | None:
        return next(iter(sorted((self.folder / machine.id).glob(f"*-{identity.digest}.toml"))), None)

    def _elsewhere(self, machine: Machine, identity: Identity) -> str | None:
        """Why what was measured for this recipe on this chip before no longer holds, for the user to know."""
        for path in sorted(self.folder.glob(f"*/*-{identity.digest}.toml")):
            try:
                there = tomllib.loads(path.read_text(encoding="utf-8"))["measured"]["machine"]
                if there["chip"] == machine.chip and there["backend"] == machine.backend:
                    read(path.read_text(encoding="utf-8"), machine, identity)
            except Stale as why:
                return f"{path}: measured again, because {why}"
            except (OSError, ValueError, KeyError, TypeError, InputError):
                continue
        return None

    def _set_aside(self, path: Path, machine: Machine, identity: Identity, why: str) -> Found:
        """Rename a broken file, unless another process has mended it meanwhile."""
        aside = path.with_name(path.name + BROKEN)
        try:
            with _locked(path.parent / LOCK):
                with contextlib.suppress(Exception):
                    return Found(read(path.read_text(encoding="utf-8"), machine, identity), None, path)
                os.replace(path, aside)
        except OSError as error:
            note = f"{path}: is no calibration ({why}) and cannot be set aside ({error.strerror}); measured again"
            return Found(None, note, path)
        return Found(None, f"{path}: is no calibration ({why}); set aside as {aside.name} and measured again")


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock, which ends with the process. Where the file system has no locks, whole files must do."""
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        with open(part, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")[:60] or "recipe"
