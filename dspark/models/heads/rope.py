"""Rotary positions for queries and keys, in every published spelling."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from dspark.models.heads.config import RopeConfig


class Rope:
    """Turns the last axis of [B, heads, L, head_dim]; `offset` is the first row's position, an int or one a row of B."""

    def __init__(self, config: RopeConfig, head_dim: int):
        whole = config.dims is None or config.scaling == "proportional"
        self.dims = head_dim if whole else int(config.dims or head_dim)
        self.traditional = config.style == "interleaved"
        self.theta = config.theta
        self.scale = 1.0 / config.factor if config.scaling == "linear" else 1.0
        # MLX divides positions by these; a frequency of zero is an infinite period, which turns nothing.
        self.periods = None
        if config.scaling in ("yarn", "llama3", "proportional"):
            with np.errstate(divide="ignore"):
                self.periods = mx.array((1.0 / inverse_frequencies(config, head_dim)).astype(np.float32))
        self.amplitude = amplitude(config)

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        if self.amplitude != 1.0:
            x = self._amplified(x)
        base = self.theta if self.periods is None else None
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=base, scale=self.scale, offset=offset, freqs=self.periods
        )

    def _amplified(self, x: mx.array) -> mx.array:
        if self.dims == x.shape[-1]:
            return x * self.amplitude
        return mx.concatenate([x[..., : self.dims] * self.amplitude, x[..., self.dims :]], axis=-1)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position for each turned pair, float64, as the published formulas give them."""
    if config.scaling == "proportional":
        pairs, turned = head_dim // 2, (config.dims or head_dim) // 2
        plain = config.theta ** (-2.0 * np.arange(pairs) / head_dim)
        return np.where(np.arange(pairs) < turned, plain, 0.0)
    dims = config.dims or head_dim
    plain = config.theta ** (-2.0 * np.arange(dims // 2) / dims)
    if config.scaling == "yarn":
        return _yarn(config, dims, plain)
    if config.scaling == "llama3":
        return _llama3(config, plain)
    return plain / config.factor if config.scaling == "linear" else plain


def amplitude(config: RopeConfig) -> float:
    """YaRN's factor on cosine and sine, so on queries and keys both (arXiv 2309.00071, section 3.4)."""
    if config.scaling != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    return 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0


def _yarn(config: RopeConfig, dims: int, plain: np.ndarray) -> np.ndarray:
    """Interpolate slow pairs, keep fast ones, ramp between (arXiv 2309.00071, section 3.2)."""

    def pair_of(turns: float) -> float:
        return dims * math.log(config.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0.0, 1.0)
    return plain / config.factor * ramp + plain * (1 - ramp)


def _llama3(config: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1's scaling: long wavelengths are divided, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    context, low, high = config.original_max_position, config.low_freq_factor, config.high_freq_factor
    blend = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain
