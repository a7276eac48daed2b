"""`chain` puts stages together and checks, once, that they fit; nothing of it is checked inside the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from dspark.caps.base import AbstractCap
from dspark.caps.fixed import FixedCap
from dspark.errors import BindError, ChainError
from dspark.records import Acceptance, Proposal, Settled, Verdict
from dspark.stages.base import AbstractAccept, AbstractDraft, AbstractRollback, AbstractStage, AbstractVerify
from dspark.stages.prefill import Prefill

ORDER = (
    ("prefill", Prefill, None, Settled),
    ("draft", AbstractDraft, Settled, Proposal),
    ("verify", AbstractVerify, Proposal, Verdict),
    ("accept", AbstractAccept, Verdict, Acceptance),
    ("rollback", AbstractRollback, Acceptance, Settled),
)


def _known(of: Callable[[Any], Any]) -> Any:
    """A field that follows from the others. It is asked for every round: a property would be called, and a cached one slows
    down every other field (attrs gives its class a `__getattr__`)."""
    return attrs.field(init=False, repr=False, eq=False, default=attrs.Factory(of, takes_self=True))


@attrs.frozen
class Pipeline:
    """Five stages and a cap: a description without weights. Made by `chain`; `bind` gives it a target.

    target_layer_ids: layers whose outputs the verify captures for the drafter; fits: whether the cap controller cuts and
    pads drafted blocks; foresees: whether the drafter may begin before a round is read; pends: whether its carry has arrays to
    compute beside its proposals.
    """

    prefill: Prefill
    draft: AbstractDraft
    verify: AbstractVerify
    accept: AbstractAccept
    rollback: AbstractRollback
    cap: AbstractCap
    target_layer_ids: tuple[int, ...] = _known(lambda self: self.draft.target_layer_ids)
    fits: bool = _known(lambda self: type(self.cap).fit is not AbstractCap.fit)
    foresees: bool = _known(lambda self: type(self.draft).foresee is not AbstractDraft.foresee)
    pends: bool = _known(lambda self: type(self.draft).pending is not AbstractDraft.pending)

    @property
    def needs(self) -> frozenset[str]:
        return self.draft.needs | self.verify.needs | self.accept.needs

    def check(self, provides: frozenset[str]) -> None:
        """Raise BindError where a stage needs what neither the target nor the driver provides."""
        for stage in (self.draft, self.verify, self.accept):
            missing = stage.needs - provides - {"host_tokens"}
            if missing:
                raise BindError(
                    f"{type(stage).__name__} needs {', '.join(sorted(missing))}, which this target does not provide; "
                    f"it provides {', '.join(sorted(provides))}"
                )


def chain(*stages: AbstractStage, cap: AbstractCap | int = 4) -> Pipeline:
    """Prefill, draft, verify, accept, rollback, in this order, and the cap. Raises ChainError naming the misfit."""
    found = [type(s).__name__ for s in stages]
    for (role, base, takes, gives), stage in zip(ORDER, stages, strict=False):
        if not isinstance(stage, base):
            got = type(stage).__name__
            fits = next((r for r, b, *_ in ORDER if isinstance(stage, b)), None)
            where = f"{got} is a {fits} stage" if fits else f"{got} is no stage"
            raise ChainError(f"the {role} place of the chain holds {got}, but {where}; chain() takes {_order()}")
        if (stage.takes, stage.gives) != (takes, gives):
            raise ChainError(
                f"{type(stage).__name__} takes {_name(stage.takes)} and gives {_name(stage.gives)}; "
                f"a {role} stage takes {_name(takes)} and gives {_name(gives)}"
            )
    if len(stages) != len(ORDER):
        raise ChainError(f"chain() takes {_order()}; got {len(stages)} stages: {', '.join(found) or 'none'}")
    return Pipeline(*stages, cap=FixedCap(cap) if isinstance(cap, int) else cap)  # type: ignore[arg-type]


def _order() -> str:
    return ", ".join(role for role, *_ in ORDER)


def _name(record: Any) -> str:
    return "nothing" if record is None else record.__name__
