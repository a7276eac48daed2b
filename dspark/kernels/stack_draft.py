"""A DSpark drafter's round in one launch, for NVIDIA GPUs, beside the target's forward (`stack.py`): which drafters it is written
for, its text for one, and its calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.kernels import stack
from dspark.kernels.in_place import TURN, Buffers
from dspark.kernels.precompiled import Kernel, Program
from dspark.kernels.precompiled import kernel as precompiled
from dspark.kernels.stack import Stack
from dspark.kernels.tiles import (
    in_pairs,
    joined,
    layer_vectors,
    matrices,
    packed_layers,
    packed_table,
    readable,
    tiled,
    unpacked,
)

SCALARS = ("rows", "room", "origin", "taken", "apart", "before", "kept", "drafts")
# Arrays of taps that a launch reads where they are: those of plain steps, which are a row each, and one of any number of rows.
ARRAYS = 8
TEXTS = ("stack.cu", "stack_draft.cu")
# Rows of a block at most: an operand of the tensor cores. Rows of taps: the others' way is faster for a long prompt.
MOST_ROWS, MOST_TAPS = 8, 512


class Round(NamedTuple):
    """What a kernel is compiled for: the layers; columns of a row of taps, and whether they are float16; the Markov tables' rank;
    the token of slots behind the anchor; the first slot that predicts; slots; whether a row sees keys up to its own only."""

    layers: Stack
    taps: int
    taps_half: bool
    rank: int
    mask: int
    first: int
    slots: int
    causal: bool

    def __str__(self) -> str:
        return f"draft round in one launch: {str(self.layers).partition(': ')[2]}, blocks of {self.slots}"

    @property
    def shared_bytes(self) -> int:
        share = -(-self.layers.vocab // max(1, self.layers.blocks))
        return max(self.layers.shared_bytes, share * (self.rank + 8) * 2)

    @property
    def extra_bytes(self) -> int:
        """What blocks share besides the layers' scratch, at least as large as the text's `Extra`."""
        one = self.layers
        floats = 8 * (one.hidden + one.hidden // 16 + one.layers * one.keys) + self.slots * one.vocab
        return 4 * floats + 128


def study(head: Any, taps: mx.Dtype) -> Round | str:
    """What a drafter needs of the kernel, for taps of this format, or why it is not written for it."""
    c = head.config
    if c.kind != "dspark" or c.markov != "vanilla":
        return f"a {c.kind} drafter" + (f" with a {c.markov} Markov head" if c.kind == "dspark" else "")
    odd = [
        name
        for name, usual in USUAL.items()
        if getattr(c, name) != usual and not (name == "attention_scale" and c.attention_scale == c.head_dim**-0.5)
    ]
    if odd:
        return f"{', '.join(odd)}, for which it is not written"
    if any(layer.window is not None for layer in c.layers) or len({layer.causal for layer in c.layers}) > 1:
        return "layers that see a window, or not all the same"
    markov = [head.markov_head.markov_w1, head.markov_head.markov_w2]
    own = [getattr(head, name) for name in ("embed_tokens", "lm_head") if name in head]
    if not all(map(readable, [head.fc, *markov, *own, *(m for layer in head.layers for m in matrices(layer))])):
        return "matrices of other classes than MLX's own"
    rope = head.rope
    if rope.traditional or rope.amplitude != 1.0 or rope.dims != c.head_dim:
        return "positions that are turned in another way"
    if head.dtype not in (mx.float16, mx.bfloat16) or taps not in (mx.float16, mx.bfloat16):
        return "numbers that are no floats of 16 bits"
    width = len(c.target_layer_ids) * c.target_hidden_size
    if c.head_dim % 64 or any(n % 16 for n in (c.hidden_size, c.intermediate_size, width)) or c.markov_rank % 8:
        return f"heads of {c.head_dim} and {c.hidden_size} columns, where multiples of 64 and 16 are written"
    if c.block_size > MOST_ROWS:
        return f"blocks of {c.block_size}, where {MOST_ROWS} are the most"
    layers = Stack(
        hidden=c.hidden_size,
        heads=c.num_heads,
        kv_heads=c.num_kv_heads,
        dim=c.head_dim,
        mlp=c.intermediate_size,
        layers=len(c.layers),
        vocab=c.head_vocab_size,
        tied=True,
        qk_norm=True,
        half=head.dtype == mx.float16,
        eps=c.rms_norm_eps,
        scale=head.layers[0].self_attn.scale,
    )
    if layers.nbytes > stack.MOST_BYTES:
        return f"{layers.nbytes / 1e9:.1f} GB of weights, where {stack.MOST_BYTES / 1e9:.1f} are the most"
    return Round(
        layers, width, taps == mx.float16, c.markov_rank, c.mask_token_id, c.first_slot, c.block_size, c.causal
    )


# Of a drafter's options those that the text has.
USUAL = {
    "activation": "silu", "offset_norms": False, "gated_query": False, "qkv_bias": False, "output_bias": False,
    "sinks": False, "sandwich": False, "keys_are_values": False, "value_norm": False, "value_scale": 1.0,
    "embedding_scale": 1.0, "logit_multiplier": 1.0, "logit_softcap": None, "conv_kernel": 0, "log_snr": None,
    "attention_scale": None,
}  # fmt: skip


def program(kind: Round) -> Program:
    """The kernel's text for a drafter."""
    one = kind.layers
    constants = stack.constants(one) | {
        "CAUSAL": int(kind.causal),
        "EXTRA": 5 + kind.slots,
        "TAPS": kind.taps,
        "TAPS_HALF": int(kind.taps_half),
        "RANK": kind.rank,
        "ARRAYS": ARRAYS,
        "MASK": kind.mask,
        "FIRST": kind.first,
        "SLOTS": kind.slots,
    }
    names = ("weights", "vectors", "embedding", "after", "by_row", "second", "names")
    taps = tuple(f"taps{i}" for i in range(ARRAYS))
    given = (*taps, "report", "scratch", "extra", "turn", "cache")
    return Program(
        "dspark_stack",
        stack.header(constants, TEXTS),
        f"""using namespace dspark_stack;
const uint4* own = (const uint4*)weights;
// What is not known yet on the host the forward before has left in its report.
const int keep = kept < 0 ? ((const int*)report)[0] + 1 : kept;
run({{own, (const float*)vectors, (Scratch*)scratch, (u16*)cache, nullptr, rows, before + keep, room, origin}},
    {{own + {_layers_units(kind)}LL, (const u16*)embedding, (const u16*)after, (const u16*)by_row, (const u16*)second,
      {{{", ".join(f"(const u16*){name}" for name in taps)}}}, (const int*)names, (Extra*)extra, (int*)tokens,
      ((const int*)report)[kept < 0], taken, apart, before, drafts}});""",
        tuple(f"const void* {name}" for name in (*names, *given)),
        ("void* tokens",),
        SCALARS,
        "if (rows < 1) return;",
        kind.shared_bytes,
        32 * one.warps,
    )


def _layers_units(kind: Round) -> int:
    """Loads of 16 bytes in front of what the layers and the head do not have."""
    return kind.layers.nbytes // 16


@lru_cache(None)
def compiled(kind: Round) -> Kernel | None:
    """The kernel ready to be called, None where this machine has none."""
    return precompiled(program(kind))


def head_table(head: Any, target: Any, dtype: mx.Dtype) -> mx.array:
    """The matrix that makes a drafter's logits, its own or the target's (of which a reduced vocabulary has some rows)."""
    kind = head.config.lm_head
    if kind != "borrowed":
        return unpacked(head.embed_tokens if kind == "tied" else head.lm_head, dtype)
    table = unpacked(target.lm_head_raw, dtype)
    return table[: head.config.head_vocab_size] if head.target_ids is None else table[head.target_ids]


def packed(head: Any, kind: Round, table: mx.array) -> mx.array:
    """All matrices, one behind the other: the layers', the head's, the taps', and keys and values of each layer once more."""
    one = kind.layers
    whole = lambda module: unpacked(module, one.dtype)
    parts = [*packed_layers(head.layers, one), packed_table(table, one), tiled(whole(head.fc))]
    for layer in head.layers:
        parts += [tiled(in_pairs(whole(layer.self_attn.k_proj), one.dim)), tiled(whole(layer.self_attn.v_proj))]
    return joined(parts, sum(part.nbytes for part in parts), one.dtype)


def vectors(head: Any, kind: Round) -> mx.array:
    """Norms and frequencies, float32."""
    rope, dim = head.rope, kind.layers.dim
    pairs = mx.arange(0, dim, 2, dtype=mx.float32) / dim
    turned = (
        rope.scale * mx.exp(-pairs * mx.log(mx.array(rope.theta)))
        if rope.periods is None
        else rope.scale / rope.periods
    )
    parts = [*layer_vectors(head.layers, kind.layers), head.norm.weight, turned, head.hidden_norm.weight]
    return mx.concatenate([part.astype(mx.float32) for part in parts])


Taps = mx.array | Sequence[mx.array] | None


def _parts(taps: Taps) -> tuple[mx.array, ...]:
    if taps is None:
        return ()
    return (taps,) if isinstance(taps, mx.array) else tuple(taps)


def _rows(parts: Sequence[mx.array]) -> int:
    return len(parts) - 1 + parts[-1].shape[1] if parts else 0


class DraftRound:
    """A drafter's rounds by the kernel, on one device, for one batch row and the likeliest tokens. Weights are copied when it is
    made; `target` lends what the drafter lacks.

    The context's buffers are copied when they are first seen, so that nobody else holds them, and then written in place.
    """

    arrays = ARRAYS

    def __init__(self, head: Any, kind: Round, blocks: int, target: Any = None):
        self.kind = kind._replace(layers=kind.layers._replace(blocks=blocks))
        one, markov = kind.layers, head.markov_head
        whole = lambda module: unpacked(module, one.dtype)
        after, ids = whole(markov.markov_w1), head.target_ids
        names = mx.arange(one.vocab) if ids is None else ids
        embedding = head.embed(mx.arange(head.config.vocab_size)).astype(one.dtype)
        second = whole(markov.markov_w2)
        self._fixed = [
            packed(head, kind, head_table(head, target, one.dtype)),
            vectors(head, kind),
            embedding,
            after,
            after[names],
            second,
            names.astype(mx.int32),
        ]
        self._scratch = [mx.zeros((n,), mx.uint8) for n in (one.scratch_bytes + 256 * kind.slots, kind.extra_bytes)]
        self._nothing = mx.zeros((1, 1, kind.taps), mx.float16 if kind.taps_half else mx.bfloat16)
        mx.eval(self._fixed, self._scratch, self._nothing)
        self._buffers = Buffers(one.kv_heads, one.dim, one.dtype)

    @property
    def kernel(self) -> Any:
        return compiled(self.kind)

    def takes(self, context: Any, taps: Taps) -> bool:
        """Whether a round behind this context, which takes in these taps [1, W, F] first, can go this way."""
        if len(context.starts) != 1 or self.kernel is None:
            return False
        parts = _parts(taps)
        taken = _rows(parts)
        if len(parts) > ARRAYS or any(part.shape[1] != 1 for part in parts[:-1]):
            return False
        if taken > MOST_TAPS or any(part.dtype != self._nothing.dtype for part in parts):
            return False
        rows = context.rows[0]
        # Behind a limit the buffers' beginning is not seen any more.
        ends = context.starts[0] - rows.origins[0] + taken + MOST_ROWS
        return rows.limit is None or ends <= rows.limit

    def __call__(
        self, context: Any, taps: Taps, keep: int | None, anchor: mx.array, count: int, slots: int
    ) -> mx.array:
        """`anchor` [1, 1] and `count` tokens behind it, [1, 1 + count] int32, by the first `slots` of a block; `keep` rows of the
        taps become context: one array [1, W, F], or up to ARRAYS of them, of which all but the last have one row. Where neither is
        known yet (None), `anchor` is the report of the forward that gave the taps (`Said`), and the tokens are not sent yet: there
        is time for what comes behind them. Else they are sent at once."""
        one, start, origin = self.kind.layers, context.starts[0], context.rows[0].origins[0]
        parts = _parts(taps)
        taken, held = _rows(parts), start - origin
        filled = parts or (self._nothing,)
        # Where it ends only the device may know.
        end = held + taken + slots
        cache = self._buffers.of(context.rows, held, end, end)
        (tokens,) = self.kernel(
            inputs=[
                *self._fixed, *filled, *filled[-1:] * (ARRAYS - len(filled)), anchor.astype(mx.int32), *self._scratch,
                TURN.last, cache,
            ],
            output_shapes=[(1, count + 1)],
            output_dtypes=[mx.int32],
            scalars=[
                slots, cache.shape[2], origin, taken, len(filled) - 1, held, -1 if keep is None else keep, count,
            ],
            grid=(one.blocks * 32 * one.warps, 1, 1),
            threadgroup=(32 * one.warps, 1, 1),
        )  # fmt: skip
        TURN.last = tokens
        if keep is not None:
            # It runs while the host builds what comes next.
            mx.async_eval(tokens)
        return tokens

    def absorb(self, context: Any, taps: Taps, keep: int) -> None:
        """Take in taps, of which `keep` rows become context, and draft nothing."""
        self(context, taps, keep, mx.zeros((1, 1), mx.int32), 0, 1)

    def holds(self, context: Any) -> bool:
        """Whether nothing else has written this context since."""
        return self._buffers.holds(context.rows, 0)

    def leave(self, context: Any) -> None:
        """Wait for what was sent: somebody else will write this context next."""
        self._buffers.leave(context.rows)
