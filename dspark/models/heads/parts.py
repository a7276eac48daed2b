"""What sits on a drafter's backbone: the Markov head, the confidence head, the candidate selector, log-SNR conditioning."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dspark.models.heads.config import HeadConfig


class MarkovHead(nn.Module):
    """Bias on a slot's logits from the token before it: W2 f(W1[previous]).

    vanilla: f is the identity. gated: e * sigmoid(Wg [h; e] + bg). rnn: (g, c, o) = Wj [s; e; h] + bj,
    s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), f = tanh(o), s starts at zero.
    """

    def __init__(self, c: HeadConfig):
        super().__init__()
        rank, hidden = c.markov_rank, c.hidden_size
        self.kind, self.rank = c.markov, rank
        self.markov_w1 = nn.Embedding(c.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, c.head_vocab_size, bias=False)
        if c.markov == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif c.markov == "rnn":
            self.joint_proj = nn.Linear(hidden + 2 * rank, 3 * rank)

    def feature(self, previous: mx.array, hidden: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """What W2 reads, and the next state: previous [...] ids, hidden [..., H] of the slot -> [..., rank].

        Only "rnn" has a state [..., rank]; None starts it.
        """
        e = self.markov_w1(previous)
        if self.kind == "gated":
            return e * mx.sigmoid(self.gate_proj(mx.concatenate([hidden, e], axis=-1))), None
        if self.kind != "rnn":
            return e, None
        state = mx.zeros_like(e) if state is None else state
        gate, candidate, out = mx.split(self.joint_proj(mx.concatenate([state, e, hidden], axis=-1)), 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(out), gate * state + (1 - gate) * mx.tanh(candidate)

    def features(self, previous: mx.array, hidden: mx.array) -> mx.array:
        """The same for all slots at once when every previous token is known: previous [..., K], hidden [..., K, H]."""
        if self.kind != "rnn":
            return self.feature(previous, hidden, None)[0]
        out, state = [], None
        for k in range(previous.shape[-1]):
            feature, state = self.feature(previous[..., k], hidden[..., k, :], state)
            out.append(feature)
        return mx.stack(out, axis=-2)


class ConfidenceHead(nn.Module):
    """The logit of a draft being accepted, from features [..., H] or [..., H + rank]."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.proj = nn.Linear(c.hidden_size + (c.markov_rank if c.confidence == "markov" else 0), 1)

    def __call__(self, features: mx.array) -> mx.array:
        return self.proj(features)[..., 0]


class CandidateSelector(nn.Module):
    """DFlash 2's scores of a path through candidates: u_j(b) + <A[a] * p_j, S[b]> for predecessor a and successor b."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.predecessor_codebook = mx.random.normal((c.vocab_size, c.selector_rank), scale=0.02)
        self.successor_codebook = mx.random.normal((c.vocab_size, c.selector_rank), scale=0.02)
        self.hidden_projection = nn.Linear(c.hidden_size, c.selector_rank, bias=False)

    def scores(self, hidden: mx.array, before: mx.array, ids: mx.array, unary: mx.array) -> mx.array:
        """[B, K, P, C] float32: hidden [B, K, H], predecessors `before` [B, K, P], candidates `ids` with `unary` [B, K, C]."""
        left = self.predecessor_codebook[before] * self.hidden_projection(hidden)[..., None, :]
        right = self.successor_codebook[ids]
        return unary[..., None, :] + (left @ right.swapaxes(-1, -2)).astype(mx.float32)


class LogSnrEmbed(nn.Module):
    """Adds a slot's noise level to its embedding: none at the anchor, full at the masks.

    The level's feature is [sin(t f_i), cos(t f_i)], f_i = 10000 ** (-i / 64) for i < 64, at t = 1000 for the anchor and 0 for
    a mask: (s - min) / (max - min) * 1000 at s = max and min.
    """

    PAIRS = 64

    def __init__(self, c: HeadConfig):
        super().__init__()
        self.fc1 = nn.Linear(2 * self.PAIRS, c.log_snr_width)
        self.fc2 = nn.Linear(c.log_snr_width, c.hidden_size)

    def __call__(self, slots: int) -> mx.array:
        """[slots, H]."""
        features = mx.array(log_snr_features(self.PAIRS), dtype=self.fc2.bias.dtype)
        anchor, mask = mx.split(self.fc2(nn.silu(self.fc1(features))), 2, axis=0)
        return mx.concatenate([anchor, mx.broadcast_to(mask, (slots - 1, mask.shape[-1]))], axis=0)


def log_snr_features(pairs: int) -> np.ndarray:
    """The features of the anchor and of a mask, [2, 2 pairs]."""
    angles = np.array([[1000.0], [0.0]]) * 10000.0 ** (-np.arange(pairs) / pairs)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
