"""A drafter's layer. Parameter names are the published ones, so that a checkpoint loads without renaming."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dspark.models.heads.config import HeadConfig

Mask = mx.array | str | None


class Sight(NamedTuple):
    """How a layer's rows find their places and what they see.

    rotate: [B, heads, L, head_dim] -> the same, turned to the rows' positions. join: the rows' own keys (turned) and values
    -> keys, values [B, kv_heads, S, head_dim] of all that can be seen, and the mask [.., L, S] over them.
    """

    rotate: Callable[[mx.array], mx.array]
    join: Callable[[mx.array, mx.array], tuple[mx.array, mx.array, Mask]]


def scaled_dot_product_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: None,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
) -> mx.array:
    """MLX's attention under the name and with the arguments of mlx-lm's, so that kernels can stand in for both."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


class Norm(nn.Module):
    """RMSNorm with a plain weight, or with one stored as an offset from 1."""

    def __init__(self, dims: int, eps: float, offset: bool):
        super().__init__()
        self.weight = mx.zeros((dims,)) if offset else mx.ones((dims,))
        self.eps, self.offset = eps, offset

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1 + self.weight if self.offset else self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention of block rows over context rows and the block."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        query, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, query * (2 if c.gated_query else 1), bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, keys, bias=c.qkv_bias)
        if not c.keys_are_values:
            self.v_proj = nn.Linear(c.hidden_size, keys, bias=c.qkv_bias)
        self.o_proj = nn.Linear(query, c.hidden_size, bias=c.output_bias)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps, c.offset_norms)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps, c.offset_norms)
        if c.sinks:
            self.attention_sink_bias = mx.zeros((c.num_heads,))
        self.heads, self.kv_heads, self.head_dim, self.eps = c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps
        self.scale = c.attention_scale or c.head_dim**-0.5
        self.gated, self.value_norm, self.value_scale = c.gated_query, c.value_norm, c.value_scale

    def keys_values(self, u: mx.array) -> tuple[mx.array, mx.array]:
        """Keys (normed, not turned) and values [B, kv_heads, L, head_dim] of rows u [B, L, H]."""
        split = (*u.shape[:2], self.kv_heads, self.head_dim)
        raw = self.k_proj(u).reshape(split)
        values = self.v_proj(u).reshape(split) if "v_proj" in self else raw
        if self.value_norm:
            values = mx.fast.rms_norm(values, None, self.eps)
        if self.value_scale != 1.0:
            values = values * self.value_scale
        return self.k_norm(raw).swapaxes(1, 2), values.swapaxes(1, 2)

    def __call__(self, u: mx.array, sight: Sight) -> mx.array:
        batch, rows = u.shape[0], u.size // u.shape[0] // u.shape[-1]
        flat = u.reshape(batch, rows, -1)
        queries = self.q_proj(flat).reshape(batch, rows, self.heads, -1)
        gate = None
        if self.gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        keys, values = self.keys_values(flat)
        keys, values, mask = sight.join(sight.rotate(keys), values)
        queries = sight.rotate(self.q_norm(queries).swapaxes(1, 2))
        sinks = self.attention_sink_bias if "attention_sink_bias" in self else None
        out = scaled_dot_product_attention(queries, keys, values, None, scale=self.scale, mask=mask, sinks=sinks)
        out = out.swapaxes(1, 2)
        if gate is not None:
            out = out * mx.sigmoid(gate)
        return self.o_proj(out.reshape(batch, rows, -1)).reshape(u.shape)


class MLP(nn.Module):
    """The gated MLP: down(act(gate(x)) * up(x))."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.act = nn.silu if c.activation == "silu" else nn.gelu_approx

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class BlockConv(nn.Module):
    """DFlash 2's dynamic convolution along the slots of a block, in front of a sublayer (side 0) and behind it (side 1).

    Channel h at slot t: sum over taps i of (base[side, i, h] + delta[t, side, i, h // group]) * y[t - i, h]; slots before the
    block count as zero. delta comes from the sublayer's normed input, for both sides.
    """

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.taps, self.group, self.groups = c.conv_kernel, c.conv_group, c.hidden_size // c.conv_group
        identity = (mx.arange(self.taps) == 0).astype(mx.float32)[None, :, None]
        self.base_kernel = mx.broadcast_to(identity, (2, self.taps, c.hidden_size))
        self.kernel_projection = nn.Linear(c.hidden_size, 2 * self.taps * self.groups, bias=False)

    def kernels(self, u: mx.array) -> mx.array:
        """[..., slots, 2, taps, groups, group] for inputs u [..., slots, H]."""
        delta = self.kernel_projection(u).reshape(*u.shape[:-1], 2, self.taps, self.groups, 1)
        return self.base_kernel.reshape(2, self.taps, self.groups, self.group) + delta

    def __call__(self, kernels: mx.array, side: int, y: mx.array) -> mx.array:
        rows = y.reshape(*y.shape[:-1], self.groups, self.group)
        out = kernels[..., side, 0, :, :] * rows
        for i in range(1, min(self.taps, y.shape[-2])):
            late = mx.pad(rows[..., :-i, :, :], [(0, 0)] * (rows.ndim - 3) + [(i, 0), (0, 0), (0, 0)])
            out = out + kernels[..., side, i, :, :] * late
        return out.reshape(y.shape)


class DraftLayer(nn.Module):
    """One layer over block rows [B, slots, H], or [B, blocks, slots, H] in training."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        norm = lambda: Norm(c.hidden_size, c.rms_norm_eps, c.offset_norms)
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        if c.sandwich:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
            self.layer_scalar = mx.ones((1,))
        if c.conv_kernel:
            self.attention_conv, self.mlp_conv = BlockConv(c), BlockConv(c)
        self.sandwich, self.convolved = c.sandwich, bool(c.conv_kernel)

    def __call__(self, x: mx.array, sight: Sight) -> mx.array:
        attend = lambda u: self.self_attn(u, sight)
        mixed = self._around("attention_conv", self.input_layernorm(x), attend)
        if not self.sandwich:
            x = x + mixed
            return x + self._around("mlp_conv", self.post_attention_layernorm(x), self.mlp)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self._around("mlp_conv", self.pre_feedforward_layernorm(x), self.mlp))
        return x * self.layer_scalar

    def _around(self, name: str, u: mx.array, sublayer: Callable[[mx.array], mx.array]) -> mx.array:
        if not self.convolved:
            return sublayer(u)
        conv = self[name]
        kernels = conv.kernels(u)
        return conv(kernels, 1, sublayer(conv(kernels, 0, u)))
