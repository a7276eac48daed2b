"""What NVIDIA's driver says of the GPU and MLX does not."""

from __future__ import annotations

import ctypes
from functools import lru_cache

MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


@lru_cache(1)
def multiprocessors() -> int | None:
    """Of the first GPU that this process sees, the one MLX computes on; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, count = ctypes.c_int(), ctypes.c_int()
    asked = (
        library.cuInit(0)
        or library.cuDeviceGet(ctypes.byref(device), 0)
        or library.cuDeviceGetAttribute(ctypes.byref(count), MULTIPROCESSORS, device)
    )
    return None if asked else count.value
