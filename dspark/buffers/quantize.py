"""Quantised KV caches: `kv_bits` of a recipe. What the target says is then that target's own, drafted or not."""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx

from dspark.buffers.leaves import leaves
from dspark.errors import BindError

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)


def _one_of(*allowed: int) -> Any:
    def check(instance: Any, attribute: Any, value: Any) -> None:
        if value not in allowed:
            raise BindError(f"{attribute.alias} is {value!r}; allowed: {', '.join(map(str, allowed))}")

    return check


def _not_negative(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BindError(f"{attribute.alias} is {value!r}; it must be a whole number, 0 or more")


@attrs.frozen
class KVBits:
    """Quantise KV caches to `bits` in groups of `group_size` once `start` tokens are held.

    Rotating and recurrent caches stay as they are, as in mlx-lm.
    """

    bits: int = attrs.field(default=8, validator=_one_of(*BITS))
    group_size: int = attrs.field(default=64, validator=_one_of(*GROUPS))
    start: int = attrs.field(default=0, validator=_not_negative)

    def apply(self, caches: list[Any]) -> None:
        """Swap the plain KV caches of a list, members of cache lists included. Costs a pass over what they hold."""
        for i, cache in enumerate(caches):
            if hasattr(cache, "caches"):
                members = list(cache.caches)
                self.apply(members)
                cache.caches = tuple(members)
            elif type(cache).__name__ == "KVCache":
                caches[i] = cache.to_quantized(group_size=self.group_size, bits=self.bits)

    def check(self, target: Any) -> None:
        """Raise BindError where a target's caches cannot be quantised: no plain KV cache, or heads that the group does not
        divide. Builds a forward's graph; nothing is computed."""
        caches = target.make_caches()
        target(mx.array([[0, 1]]), caches)
        plain = [(i, c) for i, c in leaves(caches) if type(c).__name__ == "KVCache"]
        if not plain:
            raise BindError("kv_bits is set, but no layer of this model has a plain KV cache to quantise; leave it out")
        for index, cache in plain:
            for array in (cache.keys, cache.values):
                if array.shape[-1] == 0 or array.shape[-1] % self.group_size:
                    raise BindError(
                        f"kv_group_size {self.group_size} does not divide the {array.shape[-1]} numbers a head of layer "
                        f"{index}; {_remedy(array.shape[-1])}"
                    )


def _remedy(size: int) -> str:
    fits = [str(g) for g in GROUPS if size and size % g == 0]
    return f"choose {' or '.join(fits)}" if fits else "leave kv_bits out"
