"""A target: a loaded model whose own forward is called as it is, never a re-implemented one."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten

from dspark.buffers.leaves import all_leaves, is_recurrent
from dspark.errors import BindError
from dspark.models.anatomy import Anatomy, study
from dspark.models.hooks import AbstractWatch, Hooks, names_any, watching
from dspark.models.recurrence import FUNCTIONS, Replay, Tape
from dspark.models.taps import Replace, StopAtLayers, Stopped, Taps
from dspark.records import Said

# Bytes of weights from which layers run long enough on a GPU for sending them early to gain more than it costs. On an H200 a round
# of a Qwen3-8B-shaped target (9 GB) took 28.8 ms as one piece and 21.2 sent ahead, one of SmolLM2-135M (98 MB) 8.8 and 9.4.
HEAVY = 1 << 30


class Target:
    """Wraps a loaded mlx-lm model, or the language part of a loaded mlx-vlm model.

    `target(ids [B, W], caches, target_layer_ids)` gives logits [B, W, V] and, where layers are named, their outputs
    concatenated [B, W, F]. Layers count in the order they run. `provides` says which abilities stages may need: "logits",
    "taps", "embed" (rows of the embedding table), "head" (the target's own way from a normed hidden state to logits).
    Hooks sit on module instances and come off with `close`; several targets may share a model and be used from several threads.
    """

    def __init__(self, model: Any, config: dict[str, Any] | None = None, name: str = "target"):
        self.model, self.config, self.name = model, config or {}, name
        self.core = language_part(model)
        text = text_config(self.config)
        self.context_length: int | None = context_limit(text)
        # A whole forward of few rows in one launch (`kernels.stack.Forward`), where this machine has it for this model.
        self.launch: Any = None
        self._hooks = Hooks()
        weakref.finalize(self, self._hooks.close)

    def close(self) -> None:
        """Take the hooks off the model. Taps and recordings end with it; safe to call twice."""
        self._hooks.close()

    # ---- facts ------------------------------------------------------------------------------------------------------

    @cached_property
    def anatomy(self) -> Anatomy:
        """The parts of the model. The first use watches a forward build its graph; nothing is computed."""
        caches = self.make_caches()
        parts = study(self.core, [layer for layer in self.core.layers if layer is not None], caches, all_leaves(caches))
        listened = [*parts.layers, *parts.windows, *(owner for owner in parts.owners if owner is not None)]
        for owner in parts.owners:
            if owner is not None:
                listened.extend(m for _, m in owner.named_modules() if names_any(m, FUNCTIONS))
        if parts.trunk is not None:
            listened.append(parts.trunk)
        self._hooks.add(listened, FUNCTIONS)
        return parts

    @property
    def num_layers(self) -> int:
        """Layer calls of a forward: what `target_layer_ids` count."""
        return len(self.anatomy.steps) or len(self.anatomy.layers)

    @property
    def vocab_size(self) -> int:
        """Numbers in a row of logits, padding of the table included."""
        return self.anatomy.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.anatomy.width

    @cached_property
    def provides(self) -> frozenset[str]:
        parts = self.anatomy
        found = {"logits"}
        if parts.steps and parts.one_stream:
            found.add("taps")
        if parts.embedding is not None:
            found.add("embed")
        if parts.trunk is not None:
            found.add("head")
        return frozenset(found)

    @property
    def embedding(self) -> Any:
        """The module that looks tokens up: `embedding(ids)` gives the table's rows, unscaled."""
        return self.anatomy.embedding

    @property
    def lm_head_raw(self) -> Any:
        """The vocabulary projection's module; the embedding (with its `as_linear`) where it is tied."""
        return self.anatomy.embedding if self.anatomy.head is None else self.anatomy.head

    @cached_property
    def fingerprint(self) -> str:
        """Tells architectures and formats apart (not weights): class, config, names, shapes and dtypes of the parameters."""
        kind = f"{type(self.core).__module__}.{type(self.core).__qualname__}"
        arrays = [(name, a.shape, str(a.dtype)) for name, a in tree_flatten(self.core.parameters())]
        text = json.dumps([kind, self.config, arrays], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @cached_property
    def sends_ahead(self) -> bool:
        """Whether drafts, and layers that are tapped, are sent to the device while the host builds what comes behind them: a
        GPU with something to do meanwhile (docs/performance-notes.md). On a CPU the host is the device."""
        if mx.default_device().type == mx.DeviceType.cpu:
            return False
        return sum(array.nbytes for _, array in tree_flatten(self.core.parameters())) >= HEAVY

    # ---- running ----------------------------------------------------------------------------------------------------

    def make_caches(self) -> list[Any]:
        """Fresh caches, as the model's library makes them for it."""
        if hasattr(self.core, "make_cache"):
            return list(self.core.make_cache())
        from mlx_lm.models.cache import KVCache

        return [KVCache() for _ in self.core.layers]

    def __call__(
        self,
        ids: mx.array,
        caches: Sequence[Any] | None,
        target_layer_ids: tuple[int, ...] = (),
        tape: Tape | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """One forward. `tape`, from `record`, is filled with what a rollback may need."""
        if self.launch is not None and caches is not None:
            if tape is None and self.launch.takes(ids, caches, target_layer_ids):
                return self.launch(ids, caches, target_layer_ids)
            self.launch.leave(caches)
        if not target_layer_ids and tape is None:
            return self._logits(ids, caches), None
        taps = self._taps(target_layer_ids, sent=caches is not None and self.sends_ahead)
        watch = taps if tape is None else tape if taps is None else _Both(tape, taps)
        assert watch is not None
        with watching(watch):
            logits = self._logits(ids, caches)
        return logits, None if taps is None else taps.states(len(self.anatomy.steps))

    def follow(self, ids: mx.array, logits: mx.array, caches: Sequence[Any], target_layer_ids: tuple[int, ...]) -> bool:
        """Send the forward of ids [1, W] behind the one that gave `logits` before that is read, where its launches can do that;
        asked for it then, the target has it. Costs that forward where another one is asked for."""
        return self.launch is not None and self.launch.follow(ids, logits, caches, target_layer_ids)

    def said(self, logits: mx.array) -> Said | None:
        """What greedy decoding says of the forward that gave these logits; None where nobody looked along the way."""
        return None if self.launch is None else self.launch.said(logits)

    def record(self, width: int) -> Tape:
        """A tape for a forward of `width` rows."""
        parts = self.anatomy
        return Tape(width, frozenset(map(id, parts.owners)), frozenset(map(id, parts.windows)))

    def embed(self, ids: mx.array, scaled: bool = False) -> mx.array:
        """Rows of the embedding table [B, W, D]; `scaled`: as the first layer gets them, multipliers and norms included."""
        if not scaled:
            return self.embedding(ids)
        try:
            with watching(StopAtLayers(frozenset(map(id, self.anatomy.layers)))):
                self._logits(ids, self.make_caches())
        except Stopped as stopped:
            return stopped.state
        raise BindError(f"{self.name} does not call its layers one by one, so their input cannot be taken")

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [B, W, V] of hidden states [B, W, D] behind the final norm, by the target's own head: tied or not,
        quantised, capped and scaled as the model does it. Costs one vocabulary projection."""
        parts = self.anatomy
        if parts.trunk is None:
            raise BindError(f"{self.name} has no part whose result its head takes, so the head cannot be used alone")
        value = (hidden, *[None] * (parts.trunk_gives_tuple - 1)) if parts.trunk_gives_tuple else hidden
        with watching(Replace(parts.trunk, value)):
            return self._logits(mx.zeros(hidden.shape[:2], mx.int32), None)

    @cached_property
    def _replays(self) -> tuple[Replay | None, ...]:
        """For each recurrent cache, in the order of `all_leaves`, how it is rebuilt. Costs three small forwards."""
        caches, zeroed = self.make_caches(), self.make_caches()
        leaves, others = ([c for c in all_leaves(made) if is_recurrent(c)] for made in (caches, zeroed))
        if not leaves:
            return ()
        first = mx.array([[1, 2, 0]])
        logits = self(first, caches)[0]
        before = [list(leaf.cache) for leaf in leaves]
        for other, slots in zip(others, before, strict=True):
            other.cache = [mx.zeros(slot.shape, slot.dtype) for slot in slots]
        zero_start = _close(self(first, zeroed)[0], logits)
        tape = self.record(4)
        mx.eval(self(mx.array([[2, 0, 1, 3]]), caches, (), tape)[0])
        found = (tape.explain(leaf, slots) for leaf, slots in zip(leaves, before, strict=True))
        return tuple(None if how is None else attrs.evolve(how, zero_start=zero_start) for how in found)

    def replays(self) -> Mapping[int, Any]:
        """How each recurrent cache can be rebuilt, by its place in `all_leaves(make_caches())`; None: it cannot."""
        leaves = all_leaves(self.make_caches())
        places = [i for i, leaf in enumerate(leaves) if is_recurrent(leaf)]
        return dict(zip(places, self._replays, strict=True))

    def _taps(self, wanted: tuple[int, ...], sent: bool) -> Taps | None:
        # Without caches it is training that asks, perhaps inside a transformation, where nothing can be computed yet.
        if not wanted:
            return None
        steps = len(self.anatomy.steps)
        bad = list(wanted) if "taps" not in self.provides else [i for i in wanted if not 0 <= i < steps]
        if bad:
            what = f"its layers count from 0 to {steps - 1}"
            if "taps" not in self.provides:
                what = "its layers carry several streams" if steps else "its layers are not called one by one"
            raise BindError(f"target_layer_ids {list(bad)} do not exist in {self.name}: {what}")
        return Taps(frozenset(map(id, self.anatomy.layers)), wanted, sent)

    def _logits(self, ids: mx.array, caches: Sequence[Any] | None) -> mx.array:
        if hasattr(self.core, "_rope_deltas"):
            # mlx-vlm keeps the last prompt's positions on the module; text alone has none but those of its cache.
            self.core._position_ids, self.core._rope_deltas = None, mx.zeros((1, 1), mx.int32)
        out = self.core(ids, cache=caches)
        return getattr(out, "logits", out)


class _Both(AbstractWatch):
    """Tape and taps of one forward."""

    def __init__(self, tape: Tape, taps: Taps):
        self._tape, self._taps = tape, taps
        self.computed, self.resumable = tape.computed, tape.resumable

    def called(self, module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._tape.called(module, call, args, kwargs)
        self._taps.note(module, out)
        return out


def _close(a: mx.array, b: mx.array) -> bool:
    """Whether two computations of the same logits agree to 1 in 1000 of their spread."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return bool((mx.abs(a - b).max() <= 1e-3 * mx.abs(b).max()).item())


def language_part(model: Any) -> Any:
    """The part of a model that turns tokens into logits: the model itself, or an mlx-vlm model's language model."""
    if type(model).__module__.startswith("mlx_vlm.") and "language_model" in model:
        return model.language_model
    return model


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), dict):
            return {**config, **config[key]}
    return config


def context_limit(config: dict[str, Any]) -> int | None:
    """Tokens of context that a text config allows, None where it does not say."""
    for key in ("max_position_embeddings", "model_max_length", "max_sequence_length", "n_positions", "seq_length"):
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
