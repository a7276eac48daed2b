"""What a drafter network is: every way in which published drafters differ, as one frozen record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from dspark.errors import CheckpointError

KINDS = ("dspark", "dflash", "dflash2")
TABLES = ("own", "borrowed", "tied")
MARKOV = ("none", "vanilla", "gated", "rnn")
CONFIDENCE = ("none", "hidden", "markov")
ROPE_STYLES = ("neox", "interleaved")
ROPE_SCALINGS = ("none", "linear", "yarn", "llama3", "proportional")
ACTIVATIONS = ("silu", "gelu_tanh")
MAX_SIZE = 1 << 24
MAX_LAYERS = 256
MAX_BLOCK = 512


def _one_of(what: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise CheckpointError(f"{what} is {value!r}; allowed are {', '.join(allowed)}")


@attrs.frozen(kw_only=True)
class RopeConfig:
    """Rotary positions. `style`: "neox" turns halves, "interleaved" turns neighbours.

    dims: how many dimensions of a head are turned (None: all); with "proportional" the others keep a frequency of zero and
    the denominator stays the whole head. yarn, linear and llama3 read the fields that their published formulas name.
    """

    theta: float = 10000.0
    style: str = "neox"
    dims: int | None = None
    scaling: str = "none"
    factor: float = 1.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __attrs_post_init__(self) -> None:
        _one_of("rope style", self.style, ROPE_STYLES)
        _one_of("rope scaling", self.scaling, ROPE_SCALINGS)
        for name, value in (("rope theta", self.theta), ("rope factor", self.factor)):
            if not 0 < value < 1e12:
                raise CheckpointError(f"{name} is {value!r}; it must be above 0")
        if self.theta <= 1:
            raise CheckpointError(f"rope theta is {self.theta!r}; it must be above 1")
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise CheckpointError(f"rope turns {self.dims} dimensions of a head; it must be an even number from 2")


@attrs.frozen(kw_only=True)
class LayerConfig:
    """What a layer's slots see: of key position k from query position q, `0 <= q - k < window` when causal, else
    `-window < q - k < window`; `window` None sees all of the context."""

    causal: bool = False
    window: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window <= MAX_SIZE:
            raise CheckpointError(f"the sliding window is {self.window!r}; it must be from 1 to {MAX_SIZE}")


@attrs.frozen(kw_only=True)
class HeadConfig:
    """One drafter network.

    anchor_predicts: slot j (from 0) predicts the token behind its own, `block_size` drafts a block; otherwise slot j (from 1)
    predicts the token at its own place, `block_size - 1` drafts.
    target_layer_ids: decoder layers of the target whose outputs are the taps, in order; -1 is the embedding's output.
    offset_norms: RMSNorm weights are stored as w - 1. gated_query: q_proj holds [query, gate] a head.
    sandwich: Gemma's norms behind each sublayer and its layer_scalar. keys_are_values: no v_proj; values are the raw keys.
    value_norm: values pass an RMSNorm without weight. attention_scale None: head_dim ** -0.5.
    embedding, lm_head: "own" (in the file), "borrowed" (the target's) or "tied" (lm_head only: the own embedding).
    draft_vocab_size: rows of a reduced lm_head, None for the whole vocabulary. vocab_size counts the target's rows.
    confidence: what the confidence head reads: "hidden", "markov" (hidden and the Markov embedding) or "none".
    log_snr: (min, max) of the noise levels that are embedded into the block; log_snr_width its inner width.
    """

    kind: str
    block_size: int
    anchor_predicts: bool
    mask_token_id: int
    target_layer_ids: tuple[int, ...] = attrs.field(converter=tuple)
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...] = attrs.field(converter=tuple)
    target_hidden_size: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    activation: str = "silu"
    attention_scale: float | None = None
    offset_norms: bool = False
    gated_query: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    sandwich: bool = False
    keys_are_values: bool = False
    value_norm: bool = False
    value_scale: float = 1.0
    embedding: str = "borrowed"
    lm_head: str = "borrowed"
    embedding_scale: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    draft_vocab_size: int | None = None
    markov: str = "none"
    markov_rank: int = 0
    confidence: str = "none"
    confidence_temperatures: tuple[float, ...] = attrs.field(default=(), converter=tuple)
    conv_kernel: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    selector_top_k: int = 0
    log_snr: tuple[float, float] | None = None
    log_snr_width: int = 0

    def __attrs_post_init__(self) -> None:
        _check_choices(self)
        _check_sizes(self)
        _check_heads(self)

    @property
    def num_drafts(self) -> int:
        """Most tokens that one block drafts."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot that is a prediction."""
        return 0 if self.anchor_predicts else 1

    @property
    def causal(self) -> bool:
        """No slot sees a later one, so a prefix of the block may be computed alone."""
        return all(layer.causal for layer in self.layers)

    @property
    def head_vocab_size(self) -> int:
        """Rows that lm_head yields."""
        return self.draft_vocab_size or self.vocab_size

    def slots_for(self, cap: int) -> int:
        """Slots to compute for `cap` drafts: a prefix where every layer is causal, else the whole block."""
        return min(cap + self.first_slot, self.block_size) if self.causal else self.block_size


def _check_choices(c: HeadConfig) -> None:
    _one_of("kind", c.kind, KINDS)
    _one_of("activation", c.activation, ACTIVATIONS)
    _one_of("the Markov head", c.markov, MARKOV)
    _one_of("the confidence head", c.confidence, CONFIDENCE)
    _one_of("the embedding", c.embedding, TABLES[:2])
    _one_of("lm_head", c.lm_head, TABLES)
    if c.lm_head == "tied" and c.embedding != "own":
        raise CheckpointError("lm_head is tied to an embedding that the drafter does not have")


def _check_sizes(c: HeadConfig) -> None:
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "target_hidden_size",
    )
    for name in sizes:
        if not 1 <= getattr(c, name) <= MAX_SIZE:
            raise CheckpointError(f"{name} is {getattr(c, name)!r}; it must be from 1 to {MAX_SIZE}")
    if not 1 <= len(c.layers) <= MAX_LAYERS:
        raise CheckpointError(f"the drafter has {len(c.layers)} layers; it must have 1 to {MAX_LAYERS}")
    if not 1 + c.first_slot <= c.block_size <= MAX_BLOCK:
        raise CheckpointError(f"block_size is {c.block_size!r}; it must be from {1 + c.first_slot} to {MAX_BLOCK}")
    if not c.target_layer_ids or min(c.target_layer_ids) < -1 or len(set(c.target_layer_ids)) < len(c.target_layer_ids):
        raise CheckpointError(
            f"target_layer_ids are {list(c.target_layer_ids)}; each must stand once and be -1 or more"
        )
    if not 0 <= c.mask_token_id < c.vocab_size:
        raise CheckpointError(f"mask_token_id is {c.mask_token_id!r}, no row of a vocabulary of {c.vocab_size}")
    if c.draft_vocab_size is not None and not 1 <= c.draft_vocab_size < c.vocab_size:
        raise CheckpointError(f"the reduced vocabulary has {c.draft_vocab_size!r} of {c.vocab_size} rows")
    if c.num_heads % c.num_kv_heads:
        raise CheckpointError(f"{c.num_heads} query heads cannot share {c.num_kv_heads} key heads")
    if c.head_dim % 2 or (c.rope.dims or 0) > c.head_dim:
        raise CheckpointError(
            f"head_dim {c.head_dim} cannot be turned by a rope of {c.rope.dims or c.head_dim} dimensions"
        )


def _check_heads(c: HeadConfig) -> None:
    if (c.markov == "none") != (c.markov_rank == 0) or not 0 <= c.markov_rank <= MAX_SIZE:
        raise CheckpointError(f"the Markov head is {c.markov!r} of rank {c.markov_rank!r}, which do not go together")
    if c.confidence == "markov" and c.markov == "none":
        raise CheckpointError("the confidence head reads a Markov embedding that the drafter does not have")
    if c.kind != "dspark" and (c.markov != "none" or c.confidence != "none"):
        raise CheckpointError(f"a {c.kind} drafter has no Markov and no confidence head; kind dspark has")
    if (c.kind == "dflash2") != bool(c.selector_rank):
        raise CheckpointError("a candidate selector belongs to kind dflash2, and every dflash2 drafter has one")
    if c.kind == "dflash2" and (c.anchor_predicts or c.draft_vocab_size is not None):
        raise CheckpointError("a dflash2 drafter predicts its own slots over the whole vocabulary")
    if c.selector_rank and not 1 <= c.selector_top_k <= c.vocab_size:
        raise CheckpointError(f"selector_top_k is {c.selector_top_k!r}; it must be from 1 to {c.vocab_size}")
    if c.conv_kernel and (not 1 <= c.conv_kernel <= MAX_BLOCK or c.conv_group < 1 or c.hidden_size % c.conv_group):
        raise CheckpointError(
            f"block convolutions of {c.conv_kernel} slots in groups of {c.conv_group} do not fit {c.hidden_size} channels"
        )
    if c.log_snr is not None and not (c.log_snr[0] < c.log_snr[1] and c.log_snr_width > 0):
        raise CheckpointError(f"log-SNR conditioning from {c.log_snr[0]} to {c.log_snr[1]} is no range")
    if any(not t > 0 for t in c.confidence_temperatures):
        raise CheckpointError(f"confidence_temperatures are {list(c.confidence_temperatures)}; each must be above 0")
    if c.confidence_temperatures and len(c.confidence_temperatures) != c.num_drafts:
        raise CheckpointError(
            f"there are {len(c.confidence_temperatures)} confidence_temperatures for {c.num_drafts} drafts a block"
        )
