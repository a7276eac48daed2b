"""Sending a finished part of a graph to a GPU while the host builds what comes behind it.

A forward of few rows is hundreds of small kernels: on an H200 the host takes longer to build and launch them than they run
(docs/performance-notes.md). A CPU's host is the device, and gains nothing.
"""

from __future__ import annotations

import mlx.core as mx


def send_ahead(*arrays: mx.array | None) -> None:
    """Start computing these on a GPU; nothing is waited for. Does nothing elsewhere."""
    if mx.default_device().type == mx.DeviceType.gpu:
        mx.async_eval(*arrays)
