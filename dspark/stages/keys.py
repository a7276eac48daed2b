"""Random keys by (seed, absolute position, purpose), so that a position's noise never depends on how it was reached.

The same position of the same row draws the same noise at any width, cap, draft or batch: that is what lets sampled
decoding with drafts equal plain sampling token for token. Keys are hashed on the host (BLAKE2b in counter mode, one hash
for eight positions) and are two uint32 words each, as MLX's generator takes them. Purposes: "sample" for the token that a
position gets, "accept" for the coin that a draft must pass, "draft" for what a drafter draws.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from dspark.errors import InputError

PER_HASH = 8
KEY_BYTES = 8
SEED_LIMIT = 1 << 64


def check_seed(value: object) -> int:
    """A seed as the user wrote it, checked: a whole number from 0 to 2^64 - 1. Raises InputError."""
    try:
        seed = int(value) if isinstance(value, str) else value
    except ValueError:
        seed = None
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < SEED_LIMIT:
        raise InputError(f"seed is {value!r}; it must be a whole number from 0 to 2^64 - 1")
    return seed


def fresh_seed() -> int:
    """A seed from the system's entropy, at most 2^53 - 1 so that any JSON reader keeps it exact."""
    return secrets.randbits(53)


def row_seeds(seed: int, rows: int) -> tuple[int, ...]:
    """A seed a row for `rows` prompts that share one. Row 0 gets `seed` itself, so a batch of one equals a single prompt."""
    others = (
        hashlib.blake2b(seed.to_bytes(8, "little") + row.to_bytes(8, "little"), digest_size=8, person=b"row").digest()
        for row in range(1, rows)
    )
    return (seed, *(int.from_bytes(digest, "little") for digest in others))


def keys(seeds: Sequence[int], starts: Sequence[int], width: int, purpose: str) -> mx.array:
    """Keys [B, width, 2] uint32 of the positions starts[b] ... starts[b] + width - 1."""
    words = b"".join(_words(seed, start, width, purpose) for seed, start in zip(seeds, starts, strict=True))
    return mx.array(np.frombuffer(words, np.uint32).reshape(len(seeds), width, 2))


def coins(seeds: Sequence[int], starts: Sequence[int], width: int, purpose: str = "accept") -> mx.array:
    """Uniform numbers [B, width] float32 in [0, 1), of 24 bits, for the same positions as `keys`. Made on the host."""
    words = b"".join(_words(seed, start, width, purpose) for seed, start in zip(seeds, starts, strict=True))
    first = np.frombuffer(words, np.uint32)[::2] >> 8
    return mx.array((first * np.float32(2.0**-24)).astype(np.float32).reshape(len(seeds), width))


def noise(keys: mx.array, size: int) -> mx.array:
    """Standard Gumbel noise [..., size] float32, one independent row a key [..., 2]."""
    *lead, words = keys.shape
    if keys.size == words:
        return mx.random.gumbel((*lead, size), key=keys.reshape(words))
    rows = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys.reshape(-1, words))
    return rows.reshape(*lead, size)


def draw(logits: mx.array, keys: mx.array) -> mx.array:
    """One token a row, ids [...] int32, from softmax(logits [..., V]) by Gumbel-argmax with the row's key [..., 2]."""
    return mx.argmax(logits + noise(keys, logits.shape[-1]), axis=-1).astype(mx.int32)


def _words(seed: int, start: int, width: int, purpose: str) -> bytes:
    first = start // PER_HASH
    last = (start + width - 1) // PER_HASH
    hashes = b"".join([_hash(seed, block, purpose) for block in range(first, last + 1)])
    skip = (start - first * PER_HASH) * KEY_BYTES
    return hashes[skip : skip + width * KEY_BYTES]


@lru_cache(maxsize=1024)
def _hash(seed: int, block: int, purpose: str) -> bytes:
    data = seed.to_bytes(8, "little") + block.to_bytes(8, "little")
    return hashlib.blake2b(data, digest_size=PER_HASH * KEY_BYTES, person=purpose.encode()).digest()
