"""The block drafters: one head, one graph a draft, nothing read on the host. DSpark, DFlash and DFlash 2 differ in the head."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten

from dspark.checkpoints.drafter import TargetFacts, load_drafter
from dspark.checkpoints.sources import resolve
from dspark.checkpoints.weigh_drafter import packing
from dspark.errors import BindError, DsparkError, InputError
from dspark.models.heads import Context, Head, draft_rows, kept_prefix, noise_shape, previous_tokens
from dspark.models.heads.drafting import Sampling
from dspark.models.lending import lend
from dspark.records import Acceptance, Opening, Proposal, Settled
from dspark.stages.accept import row_accepts
from dspark.stages.base import AbstractDraft, no_proposal
from dspark.stages.draft.block_carry import BlockCarry, Foreseen
from dspark.stages.keys import keys, noise
from dspark.stages.registry import register_draft
from dspark.stages.warp import Warps
from dspark.stages.warp.truncate import Temperature

# Drafters name their weights freely, and bring no tokenizer that is needed.
DRAFTER_PATTERNS = ("*.json", "*.safetensors")
# Plain steps whose taps may wait for the next one's.
TOGETHER = 32


@attrs.frozen
class AbstractBlock(AbstractDraft):
    """A drafter's checkpoint and how to run it; `bind` loads it.

    drafter: a hub repository, a folder or a GGUF file; revision: pins a repository; bits: what its large weights are packed
    to on loading, 0 for as stored, by default what suits the machine (4 on a GPU, unpacked on a CPU with a real BLAS);
    group_size: of the packing; window: context rows that layers without a window of their own see, 0 for all; wants taps of
    the target, and its embedding and head where the checkpoint borrows them.
    """

    kind: ClassVar[str]

    drafter: str
    revision: str | None = None
    bits: int | None = None
    group_size: int = 64
    window: int = 4096

    def __attrs_post_init__(self) -> None:
        if self.window < 0:
            raise InputError(f"window is {self.window}; it must be at least 0 (0: all context rows)")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"taps"})

    @property
    def knows_q(self) -> bool:
        return True

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.kind,)

    @property
    def threshold(self) -> float:
        """Drafts are cut before the first whose confidence falls below; 0 cuts none."""
        return 0.0

    @property
    @abstractmethod
    def family(self) -> tuple[str, ...]:
        """Kinds of head that this stage runs."""

    def bind(self, target: Any) -> AbstractDraft:
        facts = TargetFacts(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_layers=target.num_layers,
            model_type=str(getattr(target, "config", {}).get("model_type", "")),
            name=target.name,
        )
        files = resolve(self.drafter, self.revision, patterns=DRAFTER_PATTERNS)
        bits, dense = packing(self.bits, files.path, self.group_size)
        head = load_drafter(files.path, bits=bits, dense=dense, group_size=self.group_size, target=facts)
        if head.config.kind not in self.family:
            raise BindError(
                f"{self.drafter} holds a {head.config.kind} drafter and the recipe asks for kind {self.kind!r}; "
                f"write kind = {head.config.kind!r}"
            )
        if self.threshold and head.config.confidence == "none":
            raise BindError(f"{self.drafter} has no confidence head; drop draft.confidence")
        lend(head, target)
        return BlockDraft(self, head)

    def init(self, opening: Opening) -> Any:
        raise BindError(f"{type(self).__name__} has no weights yet; bind the pipeline to a target first")

    def skip(self, settled: Settled, carry: Any) -> Any:
        return self.init(None)  # type: ignore[arg-type]

    def __call__(self, settled: Settled, carry: Any, cap: int) -> tuple[Proposal, Any]:
        return self.init(None)  # type: ignore[arg-type]


@register_draft("dspark")
@attrs.frozen
class DSpark(AbstractBlock):
    """A DSpark head: one block forward, then a Markov chain over its slots (arXiv:2607.05147).

    confidence: cut the block before the first draft whose confidence is lower (0 to 1; 0 keeps all). It costs a second
    device read a round.
    """

    kind = "dspark"

    confidence: float = 0.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not 0 <= self.confidence < 1:
            raise InputError(f"confidence is {self.confidence}; it must be at least 0 and below 1")

    @property
    def family(self) -> tuple[str, ...]:
        return ("dspark",)

    @property
    def threshold(self) -> float:
        return self.confidence


@register_draft("dflash")
@attrs.frozen
class DFlash(AbstractBlock):
    """A DFlash head: one block forward, every slot drafted by itself."""

    kind = "dflash"

    @property
    def family(self) -> tuple[str, ...]:
        return ("dflash",)


@register_draft("dflash2")
@attrs.frozen
class DFlash2(AbstractBlock):
    """A DFlash 2 head: one block forward with convolutions along it, then a walk through each slot's best candidates."""

    kind = "dflash2"

    @property
    def family(self) -> tuple[str, ...]:
        return ("dflash2",)


@attrs.frozen(eq=False)
class BlockDraft(AbstractDraft):
    """A block drafter with its weights: what `bind` makes of the options.

    Costs one drafter forward of the block (only the slots that the cap needs where every layer is causal), and the
    projection of the taps of a round. Draws from q where the accept stage weighs q, else takes the likeliest tokens.
    """

    options: AbstractBlock
    head: Head

    @property
    def needs(self) -> frozenset[str]:
        return self.options.needs

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.head.config.target_layer_ids

    @property
    def reads(self) -> int:
        return 2 if self.options.threshold else 1

    @property
    def sources(self) -> tuple[str, ...]:
        return self.options.sources

    @property
    def heads(self) -> tuple[Head, ...]:
        return (self.head,)

    @property
    def knows_q(self) -> bool:
        return True

    @property
    def longest(self) -> int:
        return self.head.config.num_drafts

    @property
    def written(self) -> AbstractBlock:
        return self.options

    @property
    def details(self) -> tuple[str, ...]:
        c, about = self.head.config, getattr(self.head, "about", None)
        size = sum(array.nbytes for _, array in tree_flatten(self.head.parameters()))  # type: ignore[attr-defined]
        taps = ", ".join(map(str, c.target_layer_ids))
        line = f"block of {c.block_size}, {self.longest} drafts, taps of layers {taps}, {size / 1e6:,.0f} MB"
        if about is None:
            return (line,)
        packed = (
            "unpacked weights"
            if about.dense
            else "weights as stored"
            if about.bits is None
            else f"{about.bits}-bit weights"
        )
        return (f"{about.packaging}, {line}, {packed}", *about.notes)

    def init(self, opening: Opening) -> BlockCarry:
        rows = len(opening.prompts)
        return BlockCarry(self._context((0,) * rows), opening.seeds, _drawn(opening.accept, rows))

    def resume(self, carry: BlockCarry, opening: Opening) -> BlockCarry:
        return carry._replace(seeds=opening.seeds, warps=_drawn(opening.accept, len(opening.prompts)), foreseen=None)

    def skip(self, settled: Settled, carry: BlockCarry) -> BlockCarry:
        if carry.foreseen is not None:
            carry, told = self._told(settled, carry)
            if told is not None:
                return carry
        if settled.taps is None:
            if carry.starts == settled.start:
                return carry
            # Tokens whose taps nobody has: the context begins anew behind them.
            return carry._replace(context=self._context(settled.start), waiting=())
        if settled.taps.shape[1] == 1 and set(settled.keep) == {1} and len(carry.waiting) < self._most_waiting:
            # One row costs a drafter nearly what many do, and plain steps may never be drafted behind.
            carry = carry._replace(waiting=(*carry.waiting, settled.taps))
        else:
            carry = self._absorbed(carry, settled.taps, settled.keep)
        if carry.starts != settled.start:
            raise DsparkError(
                f"a {self.options.kind} drafter was not told of all tokens: its context ends at {carry.starts}, the text at "
                f"{settled.start}"
            )
        return carry

    @property
    def _most_waiting(self) -> int:
        return TOGETHER if self.head.launch is None else self.head.launch.arrays - 1

    def _absorbed(self, carry: BlockCarry, *more: Any) -> BlockCarry:
        """The carry with what waits taken in, and then `more`: taps [B, W, F] and how many of them each row keeps."""
        if not (carry.waiting or more):
            return carry
        taps, keep = [*carry.waiting], len(carry.waiting)
        kept = (keep,) * len(carry.context.starts)
        if more:
            taps.append(more[0])
            kept = tuple([keep + k for k in more[1]])
        launch = self.head.launch
        if launch is not None and self._alone(carry) and launch.takes(carry.context, taps):
            launch.absorb(carry.context, taps, kept[0])
            return carry._replace(context=Context(carry.context.rows, (carry.context.starts[0] + kept[0],)), waiting=())
        together = taps[0] if len(taps) == 1 else mx.concatenate(taps, axis=1)
        return carry._replace(context=self.head.absorb(carry.context, together, kept), waiting=())

    def __call__(self, settled: Settled, carry: BlockCarry, cap: int) -> tuple[Proposal, BlockCarry]:
        head, count = self.head, min(cap, self.longest)
        if count and head.launch is not None and (launched := self._launched(settled, carry, count)):
            return launched
        carry = self.skip(settled, carry)
        if not count:
            return no_proposal(settled), carry
        carry = self._absorbed(carry)
        hidden = head.block(carry.context, settled.anchor, head.config.slots_for(count))
        drafted = draft_rows(head, head.predicting(hidden, count), settled.anchor, self._sampling(carry, count))
        keep = None
        if self.options.threshold:
            before = previous_tokens(settled.anchor, drafted.tokens)
            keep = kept_prefix(head.confidence(drafted.hidden, before), self.options.threshold)
        rows = len(settled.start)
        source = self.sources * rows
        proposal = Proposal(settled.anchor, drafted.tokens, (count,) * rows, drafted.q, source, settled.start, keep)
        return proposal, carry

    def _launched(self, settled: Settled, carry: BlockCarry, count: int) -> tuple[Proposal, BlockCarry] | None:
        """The same in one launch, None where it is not written for this round."""
        if not self._alone(carry):
            return None
        if carry.foreseen is not None:
            carry, tokens = self._told(settled, carry)
            if tokens is not None:
                return self._proposed(
                    settled, tokens if tokens.shape[1] <= count + 1 else tokens[:, : count + 1], carry
                )
        taps, keep = self._untold(settled, carry)
        if carry.context.starts[0] + keep != settled.start[0] or not self.head.launch.takes(carry.context, taps):
            return None
        slots = self.head.config.slots_for(count)
        tokens = self.head.launch(carry.context, taps, keep, settled.anchor, count, slots)
        return self._proposed(settled, tokens, self._up_to(settled, carry))

    def foresee(self, acceptance: Acceptance, carry: BlockCarry, cap: int) -> BlockCarry:
        proposal, taps = acceptance.verdict.proposal, acceptance.verdict.taps
        if self.head.launch is None or acceptance.report is None or taps is None or proposal.source != self.sources:
            return carry
        context, count = carry.context, min(cap, self.longest)
        if not (count and self._alone(carry)) or carry.waiting or context.starts != proposal.start:
            return carry
        if not self.head.launch.takes(context, taps):
            return carry
        slots = self.head.config.slots_for(count)
        tokens = self.head.launch(context, taps, None, acceptance.report, count, slots)
        return carry._replace(foreseen=Foreseen(tokens, taps))

    def begun(self, carry: BlockCarry) -> mx.array | None:
        return None if carry.foreseen is None else carry.foreseen.tokens

    def _alone(self, carry: BlockCarry) -> bool:
        """Whether drafts are one row's likeliest tokens, all of them believed in."""
        return carry.warps == (None,) and not self.options.threshold

    def _proposed(self, settled: Settled, block: mx.array, carry: BlockCarry) -> tuple[Proposal, BlockCarry]:
        offered = (block.shape[1] - 1,)
        return Proposal(settled.anchor, block[:, 1:], offered, None, self.sources, settled.start, None, block), carry

    @staticmethod
    def _up_to(settled: Settled, carry: BlockCarry) -> BlockCarry:
        """The carry whose context has been told of all settled tokens."""
        return carry._replace(context=Context(carry.context.rows, settled.start), waiting=(), foreseen=None)

    def _told(self, settled: Settled, carry: BlockCarry) -> tuple[BlockCarry, mx.array | None]:
        """The carry behind a round that was drafted behind before it was read, and those drafts; None where it was another."""
        foreseen = carry.foreseen
        assert foreseen is not None
        meant = settled.whole and settled.taps is foreseen.taps
        if not meant or carry.context.starts[0] + settled.keep[0] != settled.start[0]:
            return carry._replace(foreseen=None), None
        return self._up_to(settled, carry), foreseen.tokens

    @staticmethod
    def _untold(settled: Settled, carry: BlockCarry) -> tuple[Sequence[mx.array] | None, int]:
        """Taps that the context lacks, what waits and this round's, and how many rows of them count."""
        if settled.taps is None or len(settled.start) != 1:
            return None, 0
        return (*carry.waiting, settled.taps), len(carry.waiting) + settled.keep[0]

    def pending(self, carry: BlockCarry) -> Sequence[mx.array]:
        if self.head.launch is not None and self.head.launch.holds(carry.context):
            # The driver sends what was foreseen, launches are sent when they are made, and taps with the forwards they come of.
            return ()
        # Of what waits, all but the last was sent before.
        return [*carry.context.state, *carry.waiting[-1:]]

    def take(self, carry: BlockCarry, rows: Sequence[int]) -> BlockCarry:
        picked, carry = lambda values: tuple(values[r] for r in rows), self._absorbed(carry)
        return BlockCarry(carry.context.take(rows), picked(carry.seeds), picked(carry.warps))

    def join(self, carry: BlockCarry, other: BlockCarry) -> BlockCarry:
        carry, other = self._absorbed(carry), self._absorbed(other)
        return BlockCarry(carry.context.join(other.context), carry.seeds + other.seeds, carry.warps + other.warps)

    def _context(self, starts: tuple[int, ...]) -> Context:
        return self.head.make_context(starts, self.options.window or None)

    def _sampling(self, carry: BlockCarry, count: int) -> Sampling | None:
        """How to draw, where every row draws alike; a batch of several minds drafts likeliest tokens, which is lossless too."""
        warp = carry.warps[0]
        if warp is None or any(other != warp for other in carry.warps):
            return None
        first = tuple(start + 1 for start in carry.context.starts)
        *_, size = noise_shape(self.head, len(first), count)
        drawn = noise(keys(carry.seeds, first, count, "draft"), size)
        return Sampling(drawn, warp.shape_drafts, _temperature(warp))


def _temperature(warp: Warps) -> float:
    """What the logits are divided by in all."""
    return math.prod(link.value for link in warp.links if isinstance(link, Temperature))


def _drawn(accept: Any, rows: int) -> tuple[Warps | None, ...]:
    """The warps that each row's drafts are drawn with; None where its accept stage wants the likeliest tokens."""
    warps = [own.warp if getattr(own, "wants_q", False) else None for own in row_accepts(accept, rows)]
    return tuple(None if warp is None or warp.is_greedy else warp for warp in warps)
