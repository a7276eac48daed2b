"""Time to the first token against mlx_lm: `python -m benchmarks.prefill [RECIPE] [--tokens 512] [--repeats 7]`.

The same loaded model, the same made-up prompt, arms in turn (A B C, C B A): mlx_lm's generate_step, the target alone through a
session, and the recipe with its drafter, which absorbs the prompt as well. Each arm ends with its first token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import dspark


def first_of_session(engine: Any, prompt: tuple[int, ...]) -> int:
    with engine.open(prompt, max_tokens=2) as session:
        return session.step().tokens[0]


def first_of_mlx_lm(engine: Any, prompt: tuple[int, ...], chunk: int) -> int:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(prompt), engine.target.model, max_tokens=2, prefill_step_size=chunk)
    return int(next(steps)[0])


def milliseconds(arm: Callable[[], int]) -> tuple[float, int]:
    began = time.perf_counter()
    token = arm()
    return (time.perf_counter() - began) * 1000, token


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="?", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    recipe = dspark.load(options.recipe)
    # Imports mlx, which a BLAS must come before; loading opens it.
    from dspark.bench.arms import greedy, plain

    engine = greedy(recipe.bind())
    alone, chunk = plain(engine), engine.pipeline.prefill.chunk
    vocabulary = min(engine.target.vocab_size, 20000)
    prompt = tuple((i * i * 7919 + 31 * i + 100) % vocabulary for i in range(options.tokens))
    arms = {
        "mlx_lm": lambda: first_of_mlx_lm(engine, prompt, chunk),
        "target alone": lambda: first_of_session(alone, prompt),
        "recipe": lambda: first_of_session(engine, prompt),
    }
    if len({arm() for arm in arms.values()}) > 1:
        print("the arms say different first tokens")
    took: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(options.repeats):
        for name in list(arms)[:: 1 if repeat % 2 == 0 else -1]:
            took[name].append(milliseconds(arms[name])[0])
    for name, ms in took.items():
        ratios = [theirs / ours for theirs, ours in zip(took["mlx_lm"], ms, strict=True)]
        print(
            f"{name:12}  {statistics.median(ms):8.1f} ms to the first token of a prompt of {options.tokens}"
            f" ({min(ms):.1f} to {max(ms):.1f}), {statistics.median(ratios):.2f} times as fast as mlx_lm"
        )


if __name__ == "__main__":
    main()
