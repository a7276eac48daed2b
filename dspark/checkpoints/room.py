"""Will it fit? Weights, drafters and caches against this machine's memory, before a single weight is loaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from dspark.buffers.footprint import Footprint, footprint
from dspark.buffers.quantize import KVBits
from dspark.checkpoints.weigh import Sizes
from dspark.errors import CheckpointError, InputError
from dspark.models.target import language_part
from dspark.platform import DtypePlan, size_text


@attrs.frozen
class Demand:
    """What is wanted beside the weights. context: tokens that the user asks for, None for what the model allows; kv: how
    caches are quantised; drafter_nbytes: of drafters that are on this disk."""

    context: int | None = None
    kv: KVBits | None = None
    drafter_nbytes: int = 0


class Needs(NamedTuple):
    """Bytes: stored on disk, weights in memory, drafters; the caches of one row, and for how many tokens (None: unknown)."""

    stored: int
    weights: int
    drafters: int
    caches: Footprint | None
    context: int | None

    @property
    def caches_nbytes(self) -> int:
        return 0 if self.caches is None or self.context is None else self.caches.nbytes(self.context)

    def sentence(self, name: str, total: int, free: int) -> str:
        """For `explain` and for errors: what it takes, and what this machine has."""
        parts = [f"{size_text(self.weights)} of weights in memory ({size_text(self.stored)} on disk)"]
        if self.drafters:
            parts.append(f"{size_text(self.drafters)} of drafter")
        if self.caches is not None and self.context is not None:
            parts.append(f"{size_text(self.caches_nbytes)} of caches for {self.context:,} tokens of context")
        return f"{name}: {', '.join(parts)}; this machine has {size_text(total)}, {size_text(free)} free"


def needs_of(sizes: Sizes, plan: DtypePlan, config: dict[str, Any], limit: int | None, demand: Demand) -> Needs:
    """What a target takes, by its config and headers alone. limit: tokens of context that the model itself allows."""
    known = [n for n in (demand.context, limit) if n is not None]
    itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}.get(plan.dtype or _stored_dtype(config), 2)
    caches = caches_of(config, demand.kv, itemsize)
    return Needs(
        sizes.stored_nbytes,
        sizes.held_nbytes(plan),
        demand.drafter_nbytes,
        caches,
        min(known) if known else None,
    )


def caches_of(config: dict[str, Any], kv: KVBits | None, itemsize: int) -> Footprint | None:
    """The footprint of a family's caches by its config, from an outline whose weights are never computed; None where
    mlx-lm cannot make one."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import _get_classes

    try:
        model, arguments = _get_classes(config)
        core = language_part(model(arguments.from_dict(config)))
        caches = make_prompt_cache(core)
        core(mx.zeros((1, 1), mx.int32), cache=caches)
        return footprint(caches, kv, itemsize)
    except Exception:  # whatever is wrong with the config is said when the model is built
        return None


def check(name: str, needs: Needs, demand: Demand, total: int, free: int) -> str | None:
    """Raise where it cannot fit: CheckpointError for weights, InputError for a context that the user asks for. Give a note
    where weights only fit by pushing others out."""
    sentence, held = needs.sentence(name, total, free), needs.weights + needs.drafters
    if needs.weights > total:
        raise CheckpointError(f"{sentence}; they cannot fit, choose a smaller model or one quantised to fewer bits")
    if held > total:
        raise CheckpointError(f"{sentence}; target and drafter cannot fit together, choose a smaller one of either")
    if demand.context is not None and needs.caches is not None and held + needs.caches_nbytes > total:
        most = needs.caches.most_tokens(total - held) or 0
        quantise = "" if demand.kv is not None else ", or quantise the caches with --set target.kv_bits=8"
        raise InputError(f"{sentence}; so long a context cannot fit, take --max-context {most} or less{quantise}")
    return f"{sentence}, so it may swap" if held > free else None


def _stored_dtype(config: dict[str, Any]) -> str:
    return str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
