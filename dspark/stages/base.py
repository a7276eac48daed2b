"""The roles of a round. A stage is a final frozen class: its options are fields, `init` makes its carry, a call builds graph.

Stages never read the device, the environment or a module global; `round.py` reads once. Abstract classes start with
`Abstract`; wrap a stage to change it, do not override it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dspark.records import Acceptance, Opening, Proposal, Settled, Verdict

if TYPE_CHECKING:
    import mlx.core as mx

    from dspark.buffers.plan import Plan


class AbstractStage(ABC):
    """What `chain` checks: the record that a stage takes, the one it gives, and what must be there for it to work.

    `needs` names abilities of the target ("logits", "taps", "embed", "head") or of the driver ("host_tokens": the stage
    reads committed tokens on the host, so no round can be sent ahead of the last read while it drafts).
    """

    takes: ClassVar[type | None] = None
    gives: ClassVar[type] = Settled

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()


class AbstractDraft(AbstractStage):
    """Proposes tokens behind the anchor. A miss is an empty proposal, never None.

    A carry is a tuple with one entry a row unless `take` and `join` say otherwise.
    """

    takes = Settled
    gives = Proposal

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Layers whose outputs this drafter wants as taps, in the order in which it wants them concatenated."""
        return ()

    @property
    def reads(self) -> int:
        """Device reads a round, the driver's own included."""
        return 1

    @property
    def sources(self) -> tuple[str, ...]:
        """The names that this drafter signs proposals with."""
        return ()

    @property
    def heads(self) -> tuple[Any, ...]:
        """The networks that it drafts with, once bound."""
        return ()

    @property
    def knows_q(self) -> bool:
        """Whether it may draw tokens from a distribution and says which; False where each slot is one certain token."""
        return False

    @property
    def longest(self) -> int | None:
        """Most tokens it can draft in a round, None where only the cap bounds it."""
        return None

    @property
    def written(self) -> AbstractDraft:
        """The stage as a recipe writes it: the one whose `bind` made this."""
        return self

    @property
    def details(self) -> tuple[str, ...]:
        """What is known of the weights that `bind` loaded, in words, a line each."""
        return ()

    def bind(self, target: Any) -> AbstractDraft:
        """A copy with its weights loaded and checked against `target`. Raises BindError, CheckpointError or SourceError."""
        return self

    @abstractmethod
    def init(self, opening: Opening) -> Any:
        """The carry of a session that has committed nothing yet: prompts arrive through `skip`, chunk by chunk."""

    def resume(self, carry: Any, opening: Opening) -> Any:
        """An ended session's carry for a prompt that goes on from it: what it knows of the tokens stays, and what `init`
        takes from the opening (seeds, accept stages) is taken anew."""
        return carry

    @abstractmethod
    def skip(self, settled: Settled, carry: Any) -> Any:
        """Absorb committed tokens and their taps without drafting. Costs no target forward."""

    @abstractmethod
    def __call__(self, settled: Settled, carry: Any, cap: int) -> tuple[Proposal, Any]:
        """Absorb `settled`, then propose at most `cap` tokens a row."""

    def pending(self, carry: Any) -> Sequence[mx.array]:
        """Arrays that a carry may still have to compute. The driver sends them to the device, so that no graph (and no taps)
        piles up over a long prompt or over rounds in which this drafter does not draft."""
        return ()

    def foresee(self, acceptance: Acceptance, carry: Any, cap: int) -> Any:
        """Begin with the next round's drafts, at most `cap`, while this one, just sent, is not read yet: its end is known to the
        device only. What comes of it is in the carry, and is dropped where the next round is another than it was meant for. The
        driver sends it."""
        return carry

    def begun(self, carry: Any) -> mx.array | None:
        """The block [1, K + 1] that `foresee` began with, anchor and drafts; None where it did not. It is proposed as it is
        unless the round ends otherwise or the cap is another, so the target may be asked already."""
        return None

    def take(self, carry: Any, rows: Sequence[int]) -> Any:
        """The carry of some rows, in the order given (rows retire this way)."""
        return tuple(carry[r] for r in rows)

    def join(self, carry: Any, other: Any) -> Any:
        """The carry of two batches put behind one another (rows are admitted this way)."""
        return tuple(carry) + tuple(other)


class AbstractVerify(AbstractStage):
    """One target forward over anchor and drafts."""

    takes = Proposal
    gives = Verdict

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    @abstractmethod
    def __call__(self, target: Any, buffers: Any, proposal: Proposal, target_layer_ids: tuple[int, ...]) -> Verdict: ...


class AbstractAccept(AbstractStage):
    """Decides on the device how many drafts stand and which token follows. Its carry holds what warps and keys need."""

    takes = Verdict
    gives = Acceptance

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    @abstractmethod
    def init(self, opening: Opening) -> Any: ...

    @abstractmethod
    def __call__(self, verdict: Verdict, carry: Any) -> tuple[Acceptance, Any]: ...

    @abstractmethod
    def take(self, carry: Any, rows: Sequence[int]) -> Any: ...

    @abstractmethod
    def join(self, carry: Any, other: Any) -> Any: ...


class AbstractRollback(AbstractStage):
    """Brings the buffers back to the committed tokens. `plan` says, layer by layer, how; the buffers carry it out."""

    takes = Acceptance
    gives = Settled

    @abstractmethod
    def plan(self, target: Any) -> Plan:
        """The plan for a target's caches. Raises BindError naming layer, class and choices where one cannot be restored."""


def empty_drafts(anchor: mx.array) -> mx.array:
    """No drafted token: [B, 0] int32."""
    return anchor[:, :0]


def no_proposal(settled: Settled, source: str = "plain") -> Proposal:
    """The empty proposal: verifying it is the plain decoding step."""
    rows = len(settled.start)
    return Proposal(settled.anchor, empty_drafts(settled.anchor), (0,) * rows, None, (source,) * rows, settled.start)
