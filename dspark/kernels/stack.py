"""A whole forward of a Llama-like target in one launch, for NVIDIA GPUs: which targets it is written for, its weights, its
text for a target, and its calls.

A forward of a small model is hundreds of kernels, each shorter than what the host and the device need to begin it. The kernel
(`stack.cu`) has a copy of the weights in the order in which it reads them, and writes keys and values into the buffers of the
caches where they lie, behind what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import e, log2
from typing import Any, NamedTuple

import mlx.core as mx

from dspark.kernels.in_place import TURN, Buffers
from dspark.kernels.linears import rows_of
from dspark.kernels.precompiled import Kernel, Program
from dspark.kernels.precompiled import kernel as precompiled
from dspark.kernels.sent_ahead import Following, Last, SentAhead
from dspark.kernels.text import defines, shortened
from dspark.kernels.tiles import frequencies, matrices, packed, readable, tables, vectors
from dspark.models.hooks import original_class
from dspark.records import Said, new

TEXTS = ("stack.cu", "stack_target.cu")
SCALARS = ("rows", "held", "room", "unread")
# Rows of a launch at most: two operands of the tensor cores. Rows of a forward: several launches, as long as they are faster.
MOST_ROWS, MOST_LAUNCHED = 16, 128
WARPS = 8
# Blocks that share the keys of a head.
SPLITS = 4
# Bytes that the copy may take where weights are unpacked to 16 bits.
MOST_BYTES = 1 << 30
# The same of weights that stay packed, in 8 bits. A Qwen3-8B-shaped target (9 GB) is the largest that was measured.
MOST_PACKED_BYTES = 12 << 30
# Bytes that a block may have of its own, where the driver says nothing else: an H200's.
MEMORY = 227 << 10
CLASSES = ("mlx_lm.models.llama", "mlx_lm.models.qwen3")


class Stack(NamedTuple):
    """What a kernel is compiled for."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    mlp: int
    layers: int
    vocab: int
    tied: bool
    qk_norm: bool
    half: bool
    eps: float
    scale: float
    # Layers whose outputs are given, in the order of the taps.
    tapped: tuple[int, ...] = ()
    # Of a weight: 16, or 8 as they are packed.
    bits: int = 16
    # Rows in eights.
    cols: int = 1
    blocks: int = 0
    warps: int = WARPS
    splits: int = SPLITS
    # Bytes of shared memory that a block may have.
    memory: int = MEMORY

    def __str__(self) -> str:
        heads = f"{self.heads} and {self.kv_heads} heads of {self.dim}"
        sizes = f"{self.layers} layers, {self.hidden} and {self.mlp} columns, {heads}, {self.vocab:,} tokens"
        packed = ", weights in 8 bits" if self.bits == 8 else ""
        return f"forward in one launch: {sizes}, {'float16' if self.half else 'bfloat16'}{packed}"

    @property
    def dtype(self) -> mx.Dtype:
        return mx.float16 if self.half else mx.bfloat16

    @property
    def query(self) -> int:
        return self.heads * self.dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.dim

    @property
    def words(self) -> int:
        """Arrays of two numbers that tell the host of as many rows as there may be."""
        return 4 * self.cols + 1

    @property
    def padded_vocab(self) -> int:
        """Rows of the head's matrix: what blocks take at once, in tiles of 16."""
        return -(-self.vocab // (8 * self.warps)) * 8 * self.warps

    @property
    def nbytes(self) -> int:
        """Of the copy of the weights; scales of 8-bit ones are an eighth of them."""
        layer = self.hidden * (2 * self.query + 2 * self.keys + 3 * self.mlp)
        numbers = self.layers * layer + self.hidden * self.padded_vocab * (1 if self.tied else 2)
        return 2 * numbers if self.bits == 16 else numbers * 9 // 8

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: sums of products and the rows that they need, or sums of attention."""
        attention = self.warps * 8 * 4 * (self.dim + 2)
        if self.bits == 16:
            products = self.warps * self.cols * 512 + 8 * self.cols * (2 * self.hidden + 4)
            return max(products, attention)
        steps = [
            (self.hidden, (self.query + 2 * self.keys) // 16, self.cols),
            (self.query, self.hidden // 16, self.cols),
            (self.hidden, self.mlp // 16, self.cols),
            (self.mlp, self.hidden // 16, self.cols),
            (self.hidden, self.padded_vocab // (8 * self.warps), self.warps // 2 * self.cols),
        ]
        # Rows that do not fit come in parts that do.
        return max(attention, min(self.memory, max(self._streamed(*step) for step in steps)))

    def _streamed(self, columns: int, jobs: int, ends: int) -> int:
        """What a step of 8-bit weights takes of it with whole rows of x: as the text's `Plan` has it."""
        batch = min(-(-jobs // max(1, self.blocks)), self.warps // ends)
        return batch * self.warps * self.cols * 512 + 8 * self.cols * (2 * columns + columns // 8 + 4)

    @property
    def scratch_bytes(self) -> int:
        """What blocks share, at least as large as the text's `Scratch`."""
        rows, counters = 8 * self.cols, 8 * (self.layers * (5 + self.qk_norm) + 1)
        floats = rows * (self.hidden + self.hidden // 16 + (self.query + self.keys if self.qk_norm else 0))
        floats += self.heads * self.splits * rows * (self.dim + 2)
        packed = 2 * rows * (self.query + self.hidden) + 4 * self.heads if self.bits == 8 else 0
        return 4 * (counters + floats) + 2 * rows * (self.query + self.mlp) + packed + 8 * rows + 256


def study(core: Any) -> Stack | str:
    """What a language model needs of the kernel, or why it is not written for it."""
    found = original_class(core)
    if found.__module__ not in CLASSES or found.__qualname__ != "Model":
        return f"a model of class {found.__module__}.{found.__qualname__}"
    args, layers = core.args, core.model.layers
    first = layers[0].self_attn
    tied = bool(args.tie_word_embeddings)
    linears = [m for layer in layers for m in matrices(layer)]
    if not all(map(readable, [*linears, *tables(core, tied)])):
        return "matrices of other classes than MLX's own, such as adapters"
    if original_class(first.rope).__name__ not in ("RoPE", "Llama3RoPE") or frequencies(first.rope) is None:
        return "positions that are turned in another way"
    if any("bias" in m for m in linears):
        return "products with biases"
    if any(getattr(layer, "use_sliding", False) for layer in layers):
        return "layers that see a window only"
    dtype = first.q_proj["scales"].dtype if "scales" in first.q_proj else first.q_proj["weight"].dtype
    if dtype not in (mx.float16, mx.bfloat16):
        return f"{str(dtype).removeprefix('mlx.core.')} numbers, where floats of 16 bits are written"
    dim = rows_of(first.q_proj) // args.num_attention_heads
    stack = Stack(
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_key_value_heads,
        dim=dim,
        mlp=rows_of(layers[0].mlp.gate_proj),
        layers=len(layers),
        vocab=rows_of(core.model.embed_tokens),
        tied=tied,
        qk_norm="q_norm" in first,
        half=dtype == mx.float16,
        eps=args.rms_norm_eps,
        scale=first.scale,
    )
    if stack.dim % 64 or stack.hidden % 16 or stack.mlp % 16 or stack.heads % stack.kv_heads:
        return f"heads of {stack.dim} and {stack.hidden} and {stack.mlp} columns, where multiples of 64, 16 and 16 are written"
    if stack.nbytes <= MOST_BYTES:
        return stack
    if why := unfit(core, stack):
        return f"{stack.nbytes / 1e9:.1f} GB of weights, where {MOST_BYTES / 1e9:.1f} are the most, and {why}"
    stack = stack._replace(bits=8)
    if stack.nbytes > MOST_PACKED_BYTES:
        return f"{stack.nbytes / 1e9:.1f} GB of weights, where {MOST_PACKED_BYTES / 1e9:.1f} are the most"
    return stack


# ---- the text -------------------------------------------------------------------------------------------------------------


def constants(stack: Stack) -> dict[str, int | str]:
    """What is set in front of the text for a stack of layers."""
    return {
        "HIDDEN": stack.hidden,
        "HEADS": stack.heads,
        "KV_HEADS": stack.kv_heads,
        "D": stack.dim,
        "MLP": stack.mlp,
        "LAYERS": stack.layers,
        "BITS": stack.bits,
        "VOCAB": stack.vocab,
        "TAPPED": ", ".join(map(str, stack.tapped or (-2,))),
        "COLS": stack.cols,
        "WARPS": stack.warps,
        "BLOCKS": stack.blocks,
        "SPLITS": stack.splits,
        "HALF": int(stack.half),
        "EPS": f"{stack.eps:.9e}f",
        "SCALE": f"{stack.scale * log2(e):.9e}f",
        "QK_NORM": int(stack.qk_norm),
        "MEMORY": stack.memory,
    }


def unfit(core: Any, stack: Stack) -> str | None:
    """Why a target's weights cannot be held in 8 bits, with scale and bias for each 32, as they are packed; None where they can."""
    for module in [*(m for layer in core.model.layers for m in matrices(layer)), *tables(core, stack.tied)]:
        if "scales" not in module or getattr(module, "mode", "affine") != "affine":
            return "not all are packed with scales and biases"
        if module.bits not in (2, 4, 8) or module.group_size % 32 or module["scales"].dtype != stack.dtype:
            return f"some are packed in {module.bits} bits in groups of {module.group_size}"
    if stack.hidden % 32 or stack.query % 32 or stack.mlp % 32:
        return "their columns are no multiples of 32"
    return None


def header(constants: dict[str, int | str], texts: Sequence[str]) -> str:
    return defines(constants) + "".join(map(shortened, texts))


def program(stack: Stack) -> Program:
    """The kernel's text for a target, its taps and as many rows."""
    names = ("weights", "vectors", "ids", "scratch", "turn", "cache", "report")
    words = [f"word{i}" for i in range(stack.words)]
    return Program(
        "dspark_stack",
        header(constants(stack) | {"CAUSAL": 1, "TIED": int(stack.tied), "EXTRA": 1}, TEXTS),
        f"""using namespace dspark_stack;
// Of the forward before, the host may not know yet how many rows stand.
const int at = unread ? held + ((const int*)report)[0] + 1 : held;
run({{(const uint4*)weights, (const float*)vectors, (Scratch*)scratch, (u16*)cache, (u16*)taps, rows, at, room, 0}},
    (const int*)ids, {{(u16*)logits, (int*)choice, (int*)accepted, (int*)following, (int*)said,
    {{{", ".join(f"(int*){word}" for word in words)}}}}});""",
        tuple(f"const void* {name}" for name in names),
        tuple(f"void* {name}" for name in ("logits", "taps", "choice", "accepted", "following", "said", *words)),
        SCALARS,
        "if (rows < 1) return;",
        stack.shared_bytes,
        32 * stack.warps,
    )


@lru_cache(None)
def compiled(stack: Stack) -> Kernel | None:
    """The kernel ready to be called, None where this machine has none."""
    return precompiled(program(stack))


# ---- calls ----------------------------------------------------------------------------------------------------------------


class Forward:
    """A target's forwards by the kernel, on one device. Weights are copied when it is made. Caches are mlx-lm's, of one batch row;
    after the first forward theirs are views of one buffer (`Buffers`)."""

    def __init__(self, core: Any, stack: Stack, blocks: int):
        self.stack = stack._replace(blocks=blocks)
        self._weights, self._vectors = packed(core, stack), vectors(core, stack)
        self._scratch = {cols: mx.zeros((stack._replace(cols=cols).scratch_bytes,), mx.uint8) for cols in (1, 2)}
        mx.eval(self._weights, self._vectors, self._scratch)
        self._buffers = Buffers(stack.kv_heads, stack.dim, stack.dtype)
        self._said: Last | None = None
        self._ahead = SentAhead()

    def kernel(self, rows: int, tapped: tuple[int, ...]) -> tuple[Stack, Any]:
        """The kernel for as many rows and these taps."""
        kind = self.stack._replace(tapped=tapped, cols=1 if rows <= 8 else 2)
        return kind, compiled(kind)

    def takes(self, ids: mx.array, caches: Sequence[Any] | None, tapped: tuple[int, ...]) -> bool:
        """Whether a forward of these ids [1, W] behind these caches can go this way. Costs no device work."""
        if not caches or ids.shape[0] != 1 or not 1 <= ids.shape[1] <= MOST_LAUNCHED:
            return False
        first = caches[0]
        if type(first).__name__ != "KVCache" or type(caches[-1]) is not type(first) or len(caches) != self.stack.layers:
            return False
        if first.offset if first.keys is None else first.keys.dtype != self.stack.dtype:
            return False
        return self.kernel(min(ids.shape[1], MOST_ROWS), tapped)[1] is not None

    def __call__(
        self, ids: mx.array, caches: Sequence[Any], tapped: tuple[int, ...]
    ) -> tuple[mx.array, mx.array | None]:
        """Logits [1, W, V] and taps [1, W, F] of ids [1, W] behind what the caches hold. A launch for each 16 rows."""
        rows, held = ids.shape[1], caches[0].offset
        if rows <= MOST_ROWS:
            given = self._sent(ids, caches, tapped) or self._launched(ids, caches, tapped, held)
            logits, taps, said = given
            for cache in caches:
                cache.offset = held + rows
            self._said = Last(logits, said, held)
            self._ahead.note(caches, self._said)
            return logits, taps
        self._ahead.forget(caches)
        self._room(caches, held + rows)
        parts = [self._launched(ids[:, i : i + MOST_ROWS], caches, tapped, held + i) for i in range(0, rows, MOST_ROWS)]
        for cache in caches:
            cache.offset = held + rows
        logits = mx.concatenate([part[0] for part in parts], axis=1)
        return logits, mx.concatenate([part[1] for part in parts], axis=1) if tapped else None

    def follow(self, ids: mx.array, logits: mx.array, caches: Sequence[Any], tapped: tuple[int, ...]) -> bool:
        """Send the forward of ids [1, W] behind the one that gave `logits`, before it is known how many of its rows stand: as
        many as its report says. Where these very ids are asked for then, and the caches hold what it says, they were computed
        already. False where that cannot go this way. Costs a forward that is dropped where another is asked for."""
        last = self._ahead.last(caches, logits)
        if last is None or ids.shape[1] > MOST_ROWS:
            return False
        if not self.takes(ids, caches, tapped) or not self._buffers.holds(caches, caches[0].offset):
            return False
        given = self._launched(ids, caches, tapped, last.held, last)
        self._ahead.put(caches, Following(ids, tapped, last, given))
        mx.async_eval(given[2].report)
        return True

    def _sent(
        self, ids: mx.array, caches: Sequence[Any], tapped: tuple[int, ...]
    ) -> tuple[mx.array, mx.array | None, Said] | None:
        """What was computed of these ids, where they were sent behind what these caches hold."""
        given = self._ahead.take(ids, caches, tapped)
        if given is None or not self._buffers.holds(caches, caches[0].offset):
            return None
        self._room(caches, caches[0].offset + ids.shape[1])
        return given

    def _launched(
        self, ids: mx.array, caches: Sequence[Any], tapped: tuple[int, ...], held: int, last: Last | None = None
    ) -> tuple[mx.array, Any, Said]:
        """One launch behind `held` tokens; behind as many more as stand of `last`, where that is given."""
        rows = ids.shape[1]
        stack, kernel = self.kernel(rows, tapped)
        ids = ids.astype(mx.int32)
        # What may never be asked for is no part of what the caches hold.
        cache = (
            self._room(caches, held + rows)
            if last is None
            else self._room(caches, held + last.logits.shape[1] + rows, caches[0].offset)
        )
        logits, taps, choice, accepted, following, report, *words = kernel(
            inputs=[
                self._weights, self._vectors, ids, self._scratch[stack.cols], TURN.last, cache,
                ids if last is None else last.said.report,
            ],
            output_shapes=[
                (1, rows, stack.vocab), (1, rows, max(1, len(tapped)) * stack.hidden), (1, rows), (1,), (1,), (1, rows + 1),
                *[(2,)] * stack.words,
            ],
            output_dtypes=[stack.dtype, stack.dtype, *[mx.int32] * (4 + stack.words)],
            scalars=[rows, held, cache.shape[2], int(last is not None)],
            grid=(stack.blocks * 32 * stack.warps, 1, 1),
            threadgroup=(32 * stack.warps, 1, 1),
        )  # fmt: skip
        TURN.last = accepted
        return (
            logits,
            taps if tapped else None,
            new(Said, (choice, accepted, following, report, tuple(words[: rows // 2 + 1]))),
        )

    def said(self, logits: mx.array) -> Said | None:
        """What greedy decoding says of the last forward, if these are its logits."""
        last = self._said
        return last.said if last is not None and last.logits is logits else None

    def leave(self, caches: Sequence[Any]) -> None:
        """Wait for what was sent: somebody else will write these caches next."""
        self._ahead.forget(caches)
        self._buffers.leave(caches)

    def _room(self, caches: Sequence[Any], needed: int, end: int | None = None) -> mx.array:
        """The buffer of these caches, with room for as many tokens; end: how many they will hold, where that is less."""
        return self._buffers.of(caches, caches[0].offset, needed, needed if end is None else end)
