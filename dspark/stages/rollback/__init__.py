"""Rollback: how the buffers come back to the committed tokens. The plan is made by cache type, layer by layer."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from dspark.buffers.leaves import all_leaves, is_recurrent
from dspark.buffers.plan import Plan, make_plan
from dspark.stages.base import AbstractRollback
from dspark.stages.registry import register_rollback


class _Planned(AbstractRollback):
    method: ClassVar[str]

    def plan(self, target: Any) -> Plan:
        caches = target.make_caches()
        recurrent = any(is_recurrent(cache) for cache in all_leaves(caches))
        return make_plan(caches, self.method, target.replays() if recurrent and self.method != "checkpoint" else None)


@register_rollback("auto")
@attrs.frozen
class RollbackAuto(_Planned):
    """The cheapest exact rollback that each layer's cache allows: kv-trim, then recurrence-replay, then checkpoint."""

    method = "auto"


@register_rollback("kv-trim")
@attrs.frozen
class KvTrim(_Planned):
    """Cut the rejected rows off the KV caches, windows included. Free; refused where a layer caches anything else."""

    method = "kv-trim"


@register_rollback("recurrence-replay")
@attrs.frozen
class RecurrenceReplay(_Planned):
    """Cut KV caches and run recurrences again over the kept rows; refused where a layer has neither."""

    method = "recurrence-replay"


@register_rollback("checkpoint")
@attrs.frozen
class Checkpoint(_Planned):
    """Put the state from before the block back and feed the kept tokens again with the next block. Works for any cache."""

    method = "checkpoint"


def rollback_auto() -> RollbackAuto:
    """The rollback that a recipe gets when it does not choose."""
    return RollbackAuto()
