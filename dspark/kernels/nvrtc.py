"""CUDA text to machine code by NVRTC, the compiler that MLX's CUDA build brings, called through ctypes.

`mx.fast.cuda_kernel` compiles in every process and with MLX's headers, seconds for each kernel; our texts name nothing of them.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
LOADED = Path("/proc/self/maps")


class CompileError(Exception):
    """NVRTC refused a text or could not be asked; the message ends with its first complaint."""


class Nvrtc:
    """One NVRTC library. Calls may come from several threads: a program belongs to one call, and ctypes lets others run."""

    def __init__(self, library: Any):
        self._library = library
        numbers = ctypes.c_int(), ctypes.c_int()
        self._ask("nvrtcVersion", *map(ctypes.byref, numbers))
        self.version = ".".join(str(number.value) for number in numbers)

    def __call__(self, text: str, options: tuple[str, ...]) -> bytes:
        """The machine code of a text for the architecture among the options (`sm_90`). Raises CompileError."""
        program = ctypes.c_void_p()
        self._ask("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"dspark.cu", 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            try:
                self._ask("nvrtcCompileProgram", program, len(options), given)
            except CompileError as refused:
                log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
                first = next((line for line in log.splitlines() if "error" in line), log)
                raise CompileError(f"{refused}: {first}") from None
            if not (code := self._read("CUBIN", program)):
                raise CompileError("nvrtcGetCUBIN gave nothing")
            return code
        finally:
            self._ask("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._ask(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._ask(f"nvrtcGet{what}", program, room)
        return room.raw

    def _ask(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise CompileError(f"this NVRTC has no {name}")
        if code := function(*arguments):
            raise CompileError(f"{name} gave {code}")


@lru_cache(1)
def library() -> Nvrtc | None:
    """The NVRTC that this process has loaded, else the system's; None where there is none."""
    for name in [*_in_process(), *SONAMES, ctypes.util.find_library("nvrtc")]:
        if name:
            try:
                return Nvrtc(ctypes.CDLL(name))
            except (OSError, CompileError):
                continue
    return None


def _in_process() -> list[str]:
    """Paths of the libnvrtc that MLX loaded: it may lie in a folder that no search path names."""
    try:
        text = LOADED.read_text()
    except OSError:
        return []
    return list(dict.fromkeys(re.findall(r"(/\S*/libnvrtc\.so\S*)", text)))


def options(architecture: str) -> tuple[str, ...] | None:
    """What a text is compiled with for a GPU as MLX names it ("sm_90"), None where that is no name of one.

    Machine code and not PTX, as MLX does: PTX is assembled by the driver at each start, which refuses what a newer NVRTC wrote.
    No fast arithmetic; products and sums are fused where the text leaves it open, as MLX's own call has it.
    """
    found = re.fullmatch(r"sm_(\d+)[a-z]?", architecture)
    return (f"--gpu-architecture=sm_{found[1]}", "--std=c++17", "--fmad=true") if found else None
