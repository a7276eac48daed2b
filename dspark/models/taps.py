"""Taps: hidden states of chosen layers, taken from the target's own forward while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from dspark.errors import DsparkError
from dspark.models.hooks import AbstractWatch


class Taps(AbstractWatch):
    """Keeps the outputs of `wanted` steps. A step is one layer call, in execution order: a model that runs its layers twice
    has twice as many steps as layers. `layers`: ids of the layer instances; `sent`: each output is started at once."""

    def __init__(self, layers: frozenset[int], wanted: Sequence[int], sent: bool = False):
        self._layers, self._wanted, self._sent = layers, tuple(wanted), sent
        self._kept: dict[int, mx.array] = {}
        self.steps = 0

    def called(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = call(module, *args, **kwargs)
        self.note(module, out)
        return out

    def note(self, module: Any, out: Any) -> None:
        if id(module) not in self._layers:
            return
        if self.steps in self._wanted:
            # A new handle on the same buffer: some models write into a layer's output later.
            kept = self._kept[self.steps] = first_array(out)[...]
            if self._sent:
                mx.async_eval(kept)
        self.steps += 1

    def states(self, expected: int) -> mx.array:
        """The kept states in the order wanted, concatenated: [B, W, F]. Raises DsparkError where the layers did not run once."""
        if self.steps != expected:
            raise DsparkError(
                f"the target called its layers {self.steps} times in one forward, not {expected} times, so hidden states "
                "cannot be told apart; this call went through a path of its own"
            )
        states = [self._kept[i] for i in self._wanted]
        return states[0] if len(states) == 1 else mx.concatenate(states, axis=-1)


class Stopped(Exception):
    """Carries a layer's input out of a forward."""

    def __init__(self, state: mx.array):
        super().__init__("stopped in front of the first layer")
        self.state = state


class StopAtLayers(AbstractWatch):
    """Ends a forward in front of its first layer: that layer's input is the embedding as the model scales it."""

    def __init__(self, layers: frozenset[int]):
        self._layers = layers

    def called(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) in self._layers:
            raise Stopped(first_array((*args, *kwargs.values())))
        return call(module, *args, **kwargs)


class Replace(AbstractWatch):
    """Lets one module give `value` instead of running: the rest of the model sees it as that module's result."""

    def __init__(self, module: Any, value: Any):
        self._module, self._value = module, value

    def called(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._value if module is self._module else call(module, *args, **kwargs)


def first_array(value: Any) -> mx.array:
    """The first array in a value or in a (nested) tuple or list of values: a layer's hidden state."""
    if isinstance(value, mx.array):
        return value
    if isinstance(value, tuple | list):
        for item in value:
            if isinstance(item, mx.array | tuple | list):
                return first_array(item)
    raise DsparkError(f"a layer gave or took {type(value).__name__}, where a hidden state was expected")
