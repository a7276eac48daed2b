"""Two switches of MLX's CUDA build that a decoder of many shapes wants otherwise.

With cuDNN, attention of four rows or more is planned once for each number of keys, and a context grows every round: on an H200
40 to 60 ms a length (docs/performance-notes.md), many times what the round itself takes. MLX's own kernels have no such plans.

MLX keeps the CUDA graphs of what ran, and raises once it has built many times more of them than it keeps. Verifies of many
widths, prefills and parked steps are many graphs, and building one again costs milliseconds, which is no error.

MLX reads both when they first matter, so they are set before anybody imports MLX; whoever has set one keeps it. They do nothing
on Metal and on CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

SWITCHES = {"MLX_CUDA_USE_CUDNN_SDPA": "0", "MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}
# What other programs are not to inherit: set here, and not by the user.
_ours: list[str] = []


def set_switches(env: MutableMapping[str, str] = os.environ) -> None:
    """Set those that the user did not."""
    for name, value in SWITCHES.items():
        if name not in env:
            env[name] = value
            _ours.append(name)


def without_ours(env: Mapping[str, str]) -> dict[str, str]:
    """An environment as the user has it, for programs that are to run as they come."""
    return {name: value for name, value in env.items() if name not in _ours}
