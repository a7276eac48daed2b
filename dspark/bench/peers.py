"""Arms in processes of their own: other programs, in their own environments, on the same weights."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from dspark.bench.record import Run
from dspark.blas import FETCHED, FETCHED_BLIS, Blas, blis_dir, fetched_dir, open_blas
from dspark.cuda_switches import without_ours
from dspark.errors import DsparkError, InputError

WORKER = Path(__file__).with_name("worker.py")
PEERS = ("mlx-vlm", "mlx-dspark")
# dspark itself needs mlx-vlm, so that one is at hand.
AT_HAND = {"mlx-vlm": sys.executable}


class PeerError(DsparkError):
    """A peer could not load something, or broke off: what it said, in a sentence."""


@attrs.frozen
class PeerTask:
    """What a peer is to load. mode: baseline, lookup, dspark or dflash; bits: what the drafter's weights are packed to;
    same_blas: open this process's BLAS in front of mlx's."""

    target: Path
    drafter: Path | None = None
    mode: str = "baseline"
    bits: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    same_blas: bool = True


class PeerArm:
    """One program, loaded once and asked prompt by prompt. Use `close`, which ends its process."""

    def __init__(self, name: str, peer: str, python: str, task: PeerTask):
        self.name, self._peer = name, peer
        blas = open_blas()
        files = blas_files(blas) if task.same_blas else []
        self._process = subprocess.Popen(
            [python, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if not os.environ.get("DSPARK_DEBUG") else None,
            text=True,
            env=environment(os.environ, files),
        )
        self._log = _Log(self._process.stderr)
        try:
            asked = attrs.asdict(task) | {"peer": peer, "blas": files, "target": str(task.target)}
            self.facts = self._ask({**asked, "drafter": None if task.drafter is None else str(task.drafter)})
        except BaseException:
            self.close()
            raise

    @property
    def about(self) -> str:
        return f"{self._peer} {self.facts['version']}, mlx {self.facts['mlx']}"

    @property
    def dtype(self) -> str | None:
        """The floating format that most of its weights have; None where all are packed."""
        floats = {k: n for k, n in self.facts["nbytes_by_dtype"].items() if "float" in k}
        return max(floats, key=lambda k: floats[k]) if floats else None

    def run(self, ids: tuple[int, ...], max_tokens: int) -> Run:
        said = self._ask({"ids": list(ids), "max_tokens": max_tokens})
        return Run(
            tuple(said["tokens"]),
            tuple((at, count) for at, count in said["deliveries"]),
            said["took_s"],
            said["rounds"],
            said["peak_bytes"],
        )

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise PeerError(f"{self.name} ended with code {code}: {self._log.last() or 'it said nothing'}")
        said = json.loads(line)
        if "error" in said:
            raise PeerError(f"{self.name}: {said['error']}")
        return said


class _Log:
    """Reads a process's standard error, so that it never blocks, and remembers the last line."""

    def __init__(self, stream: Any):
        import threading

        self._stream, self._lines = stream, [""]
        self._thread = threading.Thread(target=self._read, name="dspark-peer-log", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream or ():
            if line.strip():
                self._lines[0] = " ".join(line.split())[:300]

    def last(self) -> str:
        self._thread.join(1)
        return self._lines[0]

    def close(self) -> None:
        self._thread.join(1)
        if self._stream is not None:
            self._stream.close()


def pythons(given: Mapping[str, str]) -> dict[str, str]:
    """The Python of each peer. Raises InputError for a name that is no peer or a path that is no program."""
    for name, path in given.items():
        if name not in PEERS:
            raise InputError(f"--peer-python {name}={path}: there is no peer {name!r}; known are {', '.join(PEERS)}")
        if not os.access(path, os.X_OK) or Path(path).is_dir():
            raise InputError(
                f"--peer-python {name}={path}: is no program; name the python of an environment that has {name}"
            )
    return AT_HAND | dict(given)


def blas_files(blas: Blas) -> list[str]:
    """The libraries to open, in order, for another process to have the same BLAS."""
    if blas.path is None:
        return []
    for folder, names in ((fetched_dir(), FETCHED), (blis_dir(), FETCHED_BLIS)):
        if Path(blas.path).parent == folder:
            helpers = [str(folder / name) for name in names[:-1]]
            return [*(path for path in helpers if Path(path).exists()), blas.path]
    return [blas.path]


def environment(own: Mapping[str, str], files: list[str]) -> dict[str, str]:
    """What a peer's process gets: nothing of this one's Python, and the core that this one's BLAS was opened for."""
    python = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
    env = {k: v for k, v in without_ours(own).items() if k not in python}
    if files and (core := _core()):
        env.setdefault("OPENBLAS_CORETYPE", core)
    return env


def _core() -> str | None:
    here = ctypes.CDLL(None)
    if not hasattr(here, "openblas_get_corename"):
        return None
    here.openblas_get_corename.restype = ctypes.c_char_p
    return here.openblas_get_corename().decode()
