"""Whom a calibration belongs to: everything of an engine that timings depend on, and nothing of where its files lie."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dspark.calibrate.record import Identity
from dspark.calibrate.widths import drafters, longest


def identity_of(engine: Any) -> Identity:
    """The identity of a bound engine: shapes and formats, not weights' values, so that a model may be moved or tuned."""
    core, rollback = getattr(engine.target, "core", None), engine.plan.summary()
    return Identity(
        target=_target(engine.target),
        drafter=" + ".join(_drafter(draft) for draft in drafters(engine.pipeline.draft)) or "none",
        quantisation=_quantisation(core) + (f", kv {engine.kv.bits}/{engine.kv.group_size}" if engine.kv else ""),
        kernels=f"{_kernels(getattr(engine, 'kernels', None))}, {rollback}",
        dtype=_dtype(core),
    )


def _kernels(kernels: Any) -> str:
    """`mlx`, or the kind of the engine's own kernels and a digest of which shapes they serve."""
    if kernels is None:
        return "mlx"
    ways = sorted((str(shape), shape.rows, found.way) for shape, found in kernels.findings.items())
    others = [*kernels.gated.items(), *kernels.attention.items()]
    if kernels.launches is not None:
        others += kernels.launches.findings.items()
    ways += sorted((str(shape), 0, found.way) for shape, found in others)
    return f"{kernels.kind} {_digest(json.dumps(ways))}"


def _target(target: Any) -> str:
    kind = getattr(target, "config", {}).get("model_type") or type(target).__name__
    print_ = getattr(target, "fingerprint", None) or _digest(type(target).__qualname__)
    return f"{kind} {print_}"


def _drafter(draft: Any) -> str:
    """How a drafter signs, the longest draft, and a digest of its network, if it has one."""
    words = [*draft.sources, str(longest(draft))]
    head = getattr(draft, "head", None)
    if isinstance(head, nn.Module):
        arrays = [(name, a.shape, str(a.dtype)) for name, a in tree_flatten(head.parameters())]
        window = getattr(getattr(draft, "options", None), "window", None)
        words.append(_digest(json.dumps([str(getattr(head, "config", "")), window, arrays], default=str)))
    return " ".join(words)


def _quantisation(core: Any) -> str:
    """`4-bit/32 x 210, 8-bit/32 x 1`, or `none`."""
    if not isinstance(core, nn.Module):
        return "none"
    packed = Counter((m.bits, m.group_size) for m in core.modules() if hasattr(m, "bits") and hasattr(m, "group_size"))
    return ", ".join(f"{bits}-bit/{size} x {n}" for (bits, size), n in sorted(packed.items())) or "none"


def _dtype(core: Any) -> str:
    """What is computed in: the commonest format of the weights that are numbers, scales included."""
    if not isinstance(core, nn.Module):
        return "float32"
    found = Counter(str(a.dtype) for _, a in tree_flatten(core.parameters()) if mx.issubdtype(a.dtype, mx.floating))
    return found.most_common(1)[0][0].removeprefix("mlx.core.") if found else "float32"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
