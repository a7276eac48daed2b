"""How a run went, in a few plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.rows import Result

ENDS = {
    "stop": "the model ended it",
    "length": "ended by the token limit",
    "cancelled": "cancelled",
    "error": "ended by an error",
    None: "not ended",
}
SHOWN_POSITIONS = 16


def summary(result: Result) -> list[str]:
    """Lines for a person: length and speed, drafts, acceptance by position."""
    first = f"first after {result.ttft_s:.2f} s" if result.tokens else "none came"
    lines = [
        f"{result.generated_tokens} tokens in {result.decode_s:.2f} s ({result.tokens_per_s:.1f} tokens/s), {first}; "
        f"{ENDS.get(result.finish, str(result.finish))}",
    ]
    cached = f", {result.cached_tokens} of them cached" if result.cached_tokens else ""
    lines.append(f"prompt of {result.prompt_tokens} tokens{cached}, read in {result.prefill_s:.2f} s")
    if result.rounds:
        rounds = ", ".join(f"{n} {source}" for source, n in sorted(result.by_source.items(), key=lambda i: -i[1]))
        lines.append(f"accepted length {result.accepted_length:.2f} over {result.rounds} rounds: {rounds}")
    if result.offered_tokens:
        rate = f"acceptance rate {100 * result.acceptance_rate:.0f} % ({result.accepted_tokens} of {result.offered_tokens})"
        lines.append(f"{rate}; by position, %: {_by_position(result.by_position)}")
    return lines


def _by_position(positions: Sequence[tuple[int, int]]) -> str:
    shown = [f"{100 * accepted / offered:.0f}" for offered, accepted in positions[:SHOWN_POSITIONS] if offered]
    return " ".join(shown) + (" ..." if len(positions) > SHOWN_POSITIONS else "")


def as_dict(result: Result) -> dict[str, Any]:
    """Every figure of a result under its own name, as plain data for JSON."""
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        "finish": result.finish,
        "error": result.error,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "generated_tokens": result.generated_tokens,
        "rounds": result.rounds,
        "offered_tokens": result.offered_tokens,
        "accepted_tokens": result.accepted_tokens,
        "accepted_length": result.accepted_length,
        "acceptance_rate": result.acceptance_rate,
        "by_position": [list(pair) for pair in result.by_position],
        "by_source": dict(result.by_source),
        "prefill_s": result.prefill_s,
        "ttft_s": result.ttft_s,
        "decode_s": result.decode_s,
        "tokens_per_s": result.tokens_per_s,
        "logprobs": [{"logprob": entry.logprob, "top": entry.top} for entry in result.logprobs],
    }
