"""Keep MLX's CUDA build from planning its attention anew at every length of context.

With cuDNN, attention of four rows or more is planned once for each number of keys, and a context grows every round: on an H200
40 to 60 ms a length (docs/performance-notes.md), many times what the round itself takes. MLX's own kernels have no such plans.
MLX reads the switch when attention first runs, so it is set before anybody imports MLX; whoever has set it keeps it. It does
nothing on Metal and on CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

SWITCH = "MLX_CUDA_USE_CUDNN_SDPA"
# What other programs are not to inherit: set here, and not by the user.
_ours: list[str] = []


def avoid_plans(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the switch, unless the user did."""
    if SWITCH not in env:
        env[SWITCH] = "0"
        _ours.append(SWITCH)


def without_ours(env: Mapping[str, str]) -> dict[str, str]:
    """An environment as the user has it, for programs that are to run as they come."""
    return {name: value for name, value in env.items() if name not in _ours}
