"""What NVIDIA's driver says of the GPU and MLX does not."""

from __future__ import annotations

import ctypes
from functools import lru_cache

MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
SHARED_MEMORY = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


def multiprocessors() -> int | None:
    """Of the first GPU that this process sees, the one MLX computes on; None without a driver."""
    return _attribute(MULTIPROCESSORS)


def shared_memory() -> int | None:
    """Bytes of it that a block may have that asks for them; None without a driver."""
    return _attribute(SHARED_MEMORY)


@lru_cache(None)
def _attribute(number: int) -> int | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    asked = (
        library.cuInit(0)
        or library.cuDeviceGet(ctypes.byref(device), 0)
        or library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    )
    return None if asked else value.value
