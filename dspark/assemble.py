"""From a recipe to an engine: load its target, put the recipe's and the checkpoint's options together, bind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dspark.checkpoints.load import Loaded, load_model
from dspark.checkpoints.progress import Report
from dspark.engine import Chat, Engine, bind
from dspark.errors import BindError, InputError
from dspark.models.target import Target
from dspark.stages.accept import Sampling

SAMPLING = frozenset(field.name for field in attrs.fields(Sampling) if field.init)


def assemble(
    recipe: Any,
    target: Any = None,
    *,
    progress: Report | None = None,
    probe: bool = True,
) -> Engine:
    """The engine that a recipe describes. `dspark.load(...).bind()` calls this.

    target: another source than the recipe's (a repository, folder or file), or a `Loaded` model, or a target object of your
    own; progress: told of downloads; probe: prove the planned rollback by a few forwards. Raises SourceError,
    CheckpointError, BindError or InputError, one sentence each.
    """
    table = recipe.target
    if target is None or isinstance(target, str):
        target = _load(recipe, target, progress)
    ready = target if not isinstance(target, Loaded) else Target(target.model, target.config, target.name)
    loaded = target if isinstance(target, Loaded) else None
    sampling = None
    if isinstance(recipe.accept, str):
        defaults = {k: v for k, v in (loaded.generation_defaults if loaded else {}).items() if k in SAMPLING}
        sampling = recipe.sampling.over(Sampling(**defaults))
    return bind(
        recipe.pipeline(),
        ready,
        loaded.tokenizer if loaded else getattr(target, "tokenizer", None),
        sampling=sampling,
        accept_kind=recipe.accept if isinstance(recipe.accept, str) else "auto",
        stop_tokens=frozenset(loaded.generation_defaults["eos_token_ids"]) if loaded else None,
        context_length=table.max_context,
        notes=loaded.notes if loaded else (),
        chat=chat_of(recipe.chat),
    )


def chat_of(table: Any) -> Chat:
    """A recipe's `[chat]` as an engine takes it: switches become variables of the chat template."""
    template: dict[str, Any] = dict(table.template)
    if table.thinking is not None:
        # Families disagree on the word; a template ignores those that it does not know.
        template = {"enable_thinking": table.thinking, "thinking": table.thinking} | template
    if table.reasoning_effort is not None:
        template = {"reasoning_effort": table.reasoning_effort} | template
    return Chat(system=table.system, raw=table.raw, template=template)


def _load(recipe: Any, source: str | None, progress: Report | None) -> Loaded:
    table = recipe.target
    own = source is None
    source = source or table.source
    if source is None:
        name = recipe.path or "this recipe"
        raise InputError(f"{name} leaves the target open: name one, for example --target mlx-community/Qwen3-0.6B-4bit")
    return load_model(
        source,
        revision=table.revision if own else None,
        sha256=table.sha256 if own else None,
        adapter_path=table.adapter_path if own else None,
        dtype=table.dtype,
        progress=progress,
    )
