"""A target: a loaded model whose own forward is called as it is, never a re-implemented one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class Target:
    """Wraps a loaded mlx-lm model.

    `target(ids [B, W], caches, target_layer_ids)` gives logits [B, W, V] and, where layers are named, their outputs
    concatenated [B, W, F]. `provides` says which abilities stages may need.
    """

    def __init__(self, model: Any, config: dict[str, Any] | None = None, name: str = "target"):
        self.model, self.config, self.name = model, config or {}, name
        text = self.config.get("text_config") or self.config
        self.vocab_size: int | None = text.get("vocab_size")
        self.hidden_size: int | None = text.get("hidden_size")
        self.context_length: int | None = text.get("max_position_embeddings")
        self.num_layers = len(model.layers)
        self.provides = frozenset({"logits"})

    def make_caches(self) -> list[Any]:
        """Fresh caches, as mlx-lm makes them for this model."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def __call__(
        self, ids: mx.array, caches: Sequence[Any], target_layer_ids: tuple[int, ...] = ()
    ) -> tuple[mx.array, mx.array | None]:
        return self.model(ids, cache=caches), None
