"""Many blocks of one text at once: what training, and an evaluation that replays a text, run instead of a round."""

from __future__ import annotations

import mlx.core as mx

from dspark.models.heads.config import LayerConfig
from dspark.models.heads.head import Head
from dspark.models.heads.layers import Attention, Sight


def packed_hidden(head: Head, taps: mx.array, anchors: mx.array, ids: mx.array) -> mx.array:
    """Hidden rows [B, N, slots, H] of N blocks a text, behind the final norm. Differentiable.

    taps [B, S, T * H_target] of the text's tokens; anchors [B, N] int32: the blocks' positions; ids [B, N]: the tokens there.
    A block sees the text before its anchor, within its layers' windows, and itself. Costs attention of N * slots rows over
    S + N * slots.
    """
    batch, blocks = anchors.shape
    slots, length = head.config.block_size, taps.shape[1]
    context = head.context(taps)
    x = head.embed_block(ids[..., None], slots)

    def rotate(rows: mx.array) -> mx.array:
        """[B, heads, N * slots, D]: each block from its own position."""
        heads, dims = rows.shape[1], rows.shape[3]
        apart = rows.reshape(batch, heads, blocks, slots, dims).swapaxes(1, 2).reshape(-1, heads, slots, dims)
        turned = head.rope(apart, anchors.reshape(-1))
        return turned.reshape(batch, blocks, heads, slots, dims).swapaxes(1, 2).reshape(rows.shape)

    # One mask for all layers that see alike, in the form that attention kernels add, made once.
    masks = {
        c: mx.where(packed_mask(anchors, length, slots, c), 0.0, -mx.inf).astype(x.dtype) for c in head.config.layers
    }
    for layer, config in zip(head.layers, head.config.layers, strict=True):
        x = layer(x, Sight(rotate, _joiner(head, layer.self_attn, context, masks[config])))
    return head.norm(x)


def packed_mask(anchors: mx.array, length: int, slots: int, layer: LayerConfig) -> mx.array:
    """bool [B, 1, N * slots, length + N * slots]."""
    batch, blocks = anchors.shape
    places = (anchors[..., None] + mx.arange(slots)).reshape(batch, -1)
    owner = mx.repeat(mx.arange(blocks), slots)
    text = mx.broadcast_to(mx.arange(length), (batch, length))
    position = mx.concatenate([text, places], axis=1)[:, None]
    first = mx.repeat(anchors, slots, axis=1)[..., None]
    ahead = places[..., None] - position
    is_text = (mx.arange(length + blocks * slots) < length)[None, None]
    own = mx.concatenate([mx.full((length,), -1), owner])[None, None] == owner[None, :, None]
    seen = mx.where(is_text, position < first, own)
    if layer.causal:
        seen = seen & (ahead >= 0)
    if layer.window is not None:
        seen = seen & (ahead < layer.window) & (ahead > -layer.window)
    return seen[:, None]


def _joiner(head: Head, attention: Attention, context: mx.array, mask: mx.array):
    def join(keys: mx.array, values: mx.array):
        before, carried = attention.keys_values(context)
        before = head.rope(before, 0)
        return mx.concatenate([before, keys], axis=2), mx.concatenate([carried, values], axis=2), mask

    return join
