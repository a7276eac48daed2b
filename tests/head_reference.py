"""A drafter written down once more, in float64 and the plainest way: every position explicit, every mask a loop, no cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dspark.models.heads import HeadConfig, RopeConfig

Weights = dict[str, np.ndarray]


def block_hidden(c: HeadConfig, w: Weights, taps: np.ndarray, anchor: int, start: int, embed: np.ndarray) -> np.ndarray:
    """Hidden rows [slots, H] behind the final norm, for taps [S, F] of the S tokens in front of position `start`."""
    context = norm(c, w["hidden_norm.weight"], taps @ w["fc.weight"].T)
    ids = [anchor] + [c.mask_token_id] * (c.block_size - 1)
    x = embed[ids] * c.embedding_scale
    for i, layer in enumerate(c.layers):
        own = {k.removeprefix(f"layers.{i}."): v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        attend = lambda u, own=own, layer=layer: attention(c, own, layer, u, context, start)
        mlp = lambda u, own=own: feed_forward(c, own, u)
        mixed = convolved(c, own, "attention_conv", norm(c, own["input_layernorm.weight"], x), attend)
        if c.sandwich:
            x = x + norm(c, own["post_attention_layernorm.weight"], mixed)
            inner = convolved(c, own, "mlp_conv", norm(c, own["pre_feedforward_layernorm.weight"], x), mlp)
            x = (x + norm(c, own["post_feedforward_layernorm.weight"], inner)) * own["layer_scalar"]
        else:
            x = x + mixed
            x = x + convolved(c, own, "mlp_conv", norm(c, own["post_attention_layernorm.weight"], x), mlp)
    return norm(c, w["norm.weight"], x)


def norm(c: HeadConfig, weight: np.ndarray | None, x: np.ndarray) -> np.ndarray:
    scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_norm_eps)
    return scaled if weight is None else scaled * (1 + weight if c.offset_norms else weight)


def linear(own: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)


def attention(c: HeadConfig, own: Weights, layer, u: np.ndarray, context: np.ndarray, start: int) -> np.ndarray:
    slots, held = len(u), len(context)
    rows = np.concatenate([context, u])
    positions = np.concatenate([np.arange(start - held, start), np.arange(start, start + slots)])
    query = linear(own, "self_attn.q_proj", u).reshape(slots, c.num_heads, -1)
    query, gate = (query[..., : c.head_dim], query[..., c.head_dim :]) if c.gated_query else (query, None)
    raw = linear(own, "self_attn.k_proj", rows).reshape(-1, c.num_kv_heads, c.head_dim)
    value = raw if c.keys_are_values else linear(own, "self_attn.v_proj", rows).reshape(raw.shape)
    value = (norm(c, None, value) if c.value_norm else value) * c.value_scale
    query = turned(c.rope, norm(c, own["self_attn.q_norm.weight"], query), positions[held:])
    key = turned(c.rope, norm(c, own["self_attn.k_norm.weight"], raw), positions)
    scale = c.attention_scale or 1 / math.sqrt(c.head_dim)
    out = np.zeros((slots, c.num_heads, c.head_dim))
    for s in range(slots):
        for h in range(c.num_heads):
            kv = h * c.num_kv_heads // c.num_heads
            seen = [j for j, p in enumerate(positions) if visible(layer, int(positions[held + s] - p))]
            scores = np.array([query[s, h] @ key[j, kv] * scale for j in seen])
            if c.sinks:
                scores = np.append(scores, own["self_attn.attention_sink_bias"][h])
            share = np.exp(scores - scores.max())
            share = share / share.sum()
            out[s, h] = sum(share[i] * value[j, kv] for i, j in enumerate(seen))
    if gate is not None:
        out = out * sigmoid(gate)
    return linear(own, "self_attn.o_proj", out.reshape(slots, -1))


def visible(layer, ahead: int) -> bool:
    """Whether a query sees a key that lies `ahead` positions before it."""
    if layer.causal and ahead < 0:
        return False
    return layer.window is None or abs(ahead) < layer.window


def turned(rope: RopeConfig, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """x [L, heads, D] at the positions given, each pair of dimensions turned as a complex number."""
    size = x.shape[-1]
    dims = size if rope.dims is None or rope.scaling == "proportional" else rope.dims
    step, factor = frequencies(rope, dims, size)
    half = dims // 2
    places = [(i, i + half) if rope.style == "neox" else (2 * i, 2 * i + 1) for i in range(half)]
    out = x.copy()
    for i, (a, b) in enumerate(places):
        spin = factor * np.exp(1j * positions * step[i])[:, None]
        pair = (x[..., a] + 1j * x[..., b]) * spin
        out[..., a], out[..., b] = pair.real, pair.imag
    return out


def frequencies(rope: RopeConfig, dims: int, size: int) -> tuple[list[float], float]:
    plain = [rope.theta ** (-2 * i / (size if rope.scaling == "proportional" else dims)) for i in range(dims // 2)]
    if rope.scaling == "proportional":
        return [f if 2 * i < (rope.dims or size) else 0.0 for i, f in enumerate(plain)], 1.0
    if rope.scaling == "linear":
        return [f / rope.factor for f in plain], 1.0
    if rope.scaling == "yarn":
        place = lambda turns: (
            dims * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )
        low, high = max(math.floor(place(rope.beta_fast)), 0), min(math.ceil(place(rope.beta_slow)), dims - 1)
        ramp = [min(max((i - low) / (high - low), 0), 1) for i in range(len(plain))]
        mixed = [f / rope.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]
        return mixed, rope.attention_factor or 0.1 * math.log(rope.factor) + 1
    if rope.scaling == "llama3":
        return [_llama3(rope, f) for f in plain], 1.0
    return plain, 1.0


def _llama3(rope: RopeConfig, f: float) -> float:
    wavelength = 2 * math.pi / f
    if wavelength < rope.original_max_position / rope.high_freq_factor:
        return f
    if wavelength > rope.original_max_position / rope.low_freq_factor:
        return f / rope.factor
    smooth = rope.original_max_position / wavelength - rope.low_freq_factor
    smooth /= rope.high_freq_factor - rope.low_freq_factor
    return (1 - smooth) * f / rope.factor + smooth * f


def feed_forward(c: HeadConfig, own: Weights, z: np.ndarray) -> np.ndarray:
    gate = linear(own, "mlp.gate_proj", z)
    if c.activation == "silu":
        gate = gate * sigmoid(gate)
    else:
        gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return linear(own, "mlp.down_proj", gate * linear(own, "mlp.up_proj", z))


def convolved(c: HeadConfig, own: Weights, name: str, u: np.ndarray, sublayer: Callable) -> np.ndarray:
    if not c.conv_kernel:
        return sublayer(u)
    base = own[f"{name}.base_kernel"]
    delta = linear(own, f"{name}.kernel_projection", u).reshape(len(u), 2, c.conv_kernel, -1)

    def side(s: int, y: np.ndarray) -> np.ndarray:
        out = np.zeros_like(y)
        for t in range(len(y)):
            for i in range(min(c.conv_kernel, t + 1)):
                out[t] += (base[s, i] + np.repeat(delta[t, s, i], c.conv_group)) * y[t - i]
        return out

    return side(1, sublayer(side(0, u)))


def base_logits(c: HeadConfig, hidden: np.ndarray, lm_head: np.ndarray) -> np.ndarray:
    logits = hidden @ lm_head.T * c.logit_multiplier
    return logits if c.logit_softcap is None else c.logit_softcap * np.tanh(logits / c.logit_softcap)


def markov_chain(
    c: HeadConfig, w: Weights, hidden: np.ndarray, base: np.ndarray, anchor: int
) -> tuple[list[int], np.ndarray]:
    """Tokens of a greedy chain, and its step logits."""
    tokens, steps, state = [anchor], [], np.zeros(c.markov_rank)
    for h, u in zip(hidden, base, strict=True):
        e = w["markov_head.markov_w1.weight"][tokens[-1]]
        f = e
        if c.markov == "gated":
            f = e * sigmoid(linear(w, "markov_head.gate_proj", np.concatenate([h, e])))
        elif c.markov == "rnn":
            g, candidate, o = np.split(linear(w, "markov_head.joint_proj", np.concatenate([state, e, h])), 3)
            state = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(candidate)
            f = np.tanh(o)
        steps.append(u + w["markov_head.markov_w2.weight"] @ f)
        tokens.append(int(steps[-1].argmax()))
    return tokens[1:], np.stack(steps)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
