"""From what a user says to token ids: chat templates, raw text, and the checks that a prompt must pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.errors import InputError
from dspark.records import Tokens

Message = Mapping[str, Any]


def encode(
    tokenizer: Any,
    prompt: str | Sequence[Message] | Sequence[int],
    *,
    system: str | None = None,
    raw: bool = False,
    template: Mapping[str, Any] | None = None,
) -> Tokens:
    """Token ids of a text, a list of messages or a list of ids (taken as they are).

    A text becomes one user message through the model's chat template, with the generation prompt opened; `raw`, or a
    tokenizer without a template, takes the text as it stands. `template`: further variables for the template. Raises
    InputError for an empty prompt, for messages where there is no template, and for what the template refuses.
    """
    if not isinstance(prompt, str) and prompt and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        return tuple(prompt)  # type: ignore[arg-type]
    if tokenizer is None:
        raise InputError("this target has no tokenizer: give the prompt as a list of token ids")
    if isinstance(prompt, str) and (raw or not has_template(tokenizer)):
        ids = _encode_text(tokenizer, prompt if system is None else f"{system}\n\n{prompt}")
    else:
        ids = _render(tokenizer, _messages(prompt, system), template or {})
    if not ids:
        raise InputError("the prompt is empty: give some text, for example dspark run RECIPE 'Why is the sky blue?'")
    return ids


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer knows a chat template."""
    known = getattr(tokenizer, "has_chat_template", None)
    return bool(getattr(tokenizer, "chat_template", None)) if known is None else bool(known)


def check_context(prompt: Tokens, context: int | None, max_tokens: int) -> int:
    """How many tokens may be generated. Raises InputError where the prompt leaves no room for one."""
    if context is None:
        return max_tokens
    if len(prompt) > context or (len(prompt) == context and max_tokens):
        raise InputError(
            f"the prompt is too long: {len(prompt)} tokens, and the context holds {context}; shorten it"
            " or, where the model allows more, raise --max-context"
        )
    return min(max_tokens, context - len(prompt))


def _messages(prompt: str | Sequence[Any], system: str | None) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            return []
        prompt = [{"role": "user", "content": prompt}]
    for i, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{i}]: expected a table with role and content, got {message!r:.80}")
    messages = [dict(m) for m in prompt]
    if system is not None:
        if messages and messages[0]["role"] == "system":
            raise InputError("there is a system message already: drop it or --system")
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _render(tokenizer: Any, messages: list[dict[str, Any]], template: Mapping[str, Any]) -> Tokens:
    if not messages:
        return ()
    if not has_template(tokenizer):
        raise InputError("this model has no chat template, so it cannot take messages: give plain text")
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template)
    except Exception as error:
        raise InputError(f"the chat template refused the messages: {error}") from error
    return tuple(int(t) for t in ids)


def _encode_text(tokenizer: Any, text: str) -> Tokens:
    if not text:
        return ()
    bos = getattr(tokenizer, "bos_token", None)
    special = bos is None or not text.startswith(bos)
    return tuple(int(t) for t in tokenizer.encode(text, add_special_tokens=special))
