"""Weights as the text of `stack.cu` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import log
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from dspark.models.hooks import original_class


def matrices(layer: Any) -> list[Any]:
    a, m = layer.self_attn, layer.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]


def tables(core: Any, tied: bool) -> list[Any]:
    """The modules with a row for each token: the head's, which comes first, and the embedding."""
    return [core.model.embed_tokens] if tied else [core.lm_head, core.model.embed_tokens]


def readable(module: Any) -> bool:
    """Whether a module's weights are all that it multiplies by, and packed as MLX packs them."""
    return original_class(module) in (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)


# Numbers of a piece, by their bytes: 16 x 16 of 16 bits, or 16 x 32 of 8 with their scales.
PIECE = {2: 256, 1: 576}


def frequencies(rope: Any) -> mx.array | None:
    """What a position is multiplied by, for each pair of columns: float32 [D / 2]; None for another kind of turning."""
    if getattr(rope, "traditional", False) or getattr(rope, "scale", 1.0) != 1.0:
        return None
    if getattr(rope, "_freqs", None) is not None:
        return 1.0 / rope._freqs.astype(mx.float32)
    if not isinstance(rope, nn.RoPE):
        return None
    return mx.exp(-mx.arange(0, rope.dims, 2, dtype=mx.float32) * (log(rope.base) / rope.dims))


def unpacked(module: Any, dtype: mx.Dtype) -> mx.array:
    """A linear's or an embedding's matrix [rows, columns]."""
    if "scales" not in module:
        return module["weight"].astype(dtype)
    mode = getattr(module, "mode", "affine")
    return mx.dequantize(
        module["weight"],
        module["scales"],
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=mode,
    ).astype(dtype)


def tiled(matrix: mx.array) -> mx.array:
    """A matrix [16 n, 16 m] as lanes read it: pieces of 16 x 16 in rows, in each 8 numbers for each of 32 lanes. Lane 4 r + q has
    rows r and r + 8 and columns 4 q to 4 q + 3: two of one row, two of the other, then the next two of both."""
    rows, columns = matrix.shape
    pieces = matrix.reshape(rows // 16, 2, 8, columns // 16, 4, 2, 2)
    return pieces.transpose(0, 3, 2, 4, 5, 1, 6).reshape(rows // 16, -1)


def in_pairs(matrix: mx.array, dim: int) -> mx.array:
    """Rows of queries' or keys' matrix so that a tile of 16 has columns i to i + 7 of a head and what is turned with them."""
    heads = matrix.shape[0] // dim
    return matrix.reshape(heads, 2, dim // 16, 8, -1).transpose(0, 2, 1, 3, 4).reshape(matrix.shape)


class Bytes(NamedTuple):
    """A packed matrix: numbers uint8 [rows, columns], scales and biases [rows, columns / 32] of 16-bit floats."""

    numbers: mx.array
    scales: mx.array
    biases: mx.array

    @classmethod
    def of(cls, module: Any) -> Bytes:
        """As a linear or an embedding is packed, whatever the bits and the group."""
        # The first of a word are its lowest bits, and a word's lowest byte is the first.
        numbers = module["weight"].view(mx.uint8)
        if module.bits < 8:
            shifts = mx.arange(0, 8, module.bits, dtype=mx.uint8)
            numbers = (numbers[..., None] >> shifts) & ((1 << module.bits) - 1)
        again = module.group_size // 32
        scales, biases = (mx.repeat(module[name], again, axis=1) for name in ("scales", "biases"))
        return cls(numbers.reshape(numbers.shape[0], -1), scales, biases)

    def each(self, change: Callable[[mx.array], mx.array]) -> Bytes:
        return Bytes(*map(change, self))


def tiled_bytes(matrix: Bytes) -> mx.array:
    """Pieces of 16 x 32: in each 16 numbers for each of 32 lanes, as `tiled` has 8 (of four neighbours the middle two exchanged),
    then scale and bias of rows r and r + 8, for each r."""
    rows, columns = matrix.numbers.shape
    pieces = matrix.numbers.reshape(rows // 16, 2, 8, columns // 32, 2, 4, 4)[..., mx.array([0, 2, 1, 3])]
    numbers = pieces.transpose(0, 3, 2, 5, 4, 1, 6).reshape(rows // 16, columns // 32, 512)
    both = mx.stack([matrix.scales, matrix.biases], axis=-1).reshape(rows // 16, 2, 8, columns // 32, 2)
    scales = both.transpose(0, 3, 2, 1, 4).reshape(rows // 16, columns // 32, 32).view(mx.uint8)
    return mx.concatenate([numbers, scales], axis=-1).reshape(rows // 16, -1)


def packed_layers(layers: Sequence[Any], stack: Any) -> Iterator[mx.array]:
    """The matrices of layers, in their order."""
    wide: Any = Bytes.of if stack.bits == 8 else partial(unpacked, dtype=stack.dtype)
    tile: Any = tiled_bytes if stack.bits == 8 else tiled

    def turned(matrix: Any) -> Any:
        change = partial(in_pairs, dim=stack.dim)
        return matrix.each(change) if isinstance(matrix, Bytes) else change(matrix)

    for layer in layers:
        q, k, v, o, gate, up, down = map(wide, matrices(layer))
        yield from (tile(turned(q)), tile(turned(k)), tile(v), tile(o))
        yield mx.stack([tile(gate), tile(up)], axis=1)
        yield tile(down)


def packed_table(table: Any, stack: Any) -> mx.array:
    """A matrix with a row for each token, and empty ones behind: an array, or `Bytes`."""

    def wide(a: mx.array) -> mx.array:
        return mx.pad(a, [(0, stack.padded_vocab - stack.vocab), (0, 0)])

    return tiled_bytes(table.each(wide)) if isinstance(table, Bytes) else tiled(wide(table))


def layer_vectors(layers: Sequence[Any], stack: Any) -> list[mx.array]:
    """The norms of layers, in their order."""
    parts = []
    for layer in layers:
        parts += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
        if stack.qk_norm:
            parts += [layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight]
    return parts


def joined(parts: Iterable[mx.array], nbytes: int, dtype: mx.Dtype) -> mx.array:
    """Matrices one behind the other, `nbytes` in all, by pieces: MLX counts no further than 2^31 along an axis. Each is made and
    written before the next, for what it is made of is large."""
    piece = PIECE[dtype.size]
    whole, at = mx.zeros((nbytes // (piece * dtype.size), piece), dtype), 0
    for part in parts:
        own = part.reshape(-1, piece)
        # Nobody else holds the whole, so it is written where it lies.
        whole[at : at + own.shape[0]] = own
        at += own.shape[0]
        mx.eval(whole)
    assert at == whole.shape[0]
    return whole


def packed(core: Any, stack: Any) -> mx.array:
    """All matrices of a target, one behind the other."""
    wide: Any = Bytes.of if stack.bits == 8 else partial(unpacked, dtype=stack.dtype)
    last = (packed_table(wide(table), stack) for table in tables(core, stack.tied))
    parts = chain(packed_layers(core.model.layers, stack), last)
    return joined(parts, stack.nbytes, mx.uint8 if stack.bits == 8 else stack.dtype)


def vectors(core: Any, stack: Any) -> mx.array:
    """Norms and frequencies of a target, float32."""
    parts = [*layer_vectors(core.model.layers, stack), core.model.norm.weight]
    parts.append(frequencies(core.model.layers[0].self_attn.rope))
    return mx.concatenate([part.astype(mx.float32) for part in parts])
