"""Four prompts in one session against the same four one after another: `python -m benchmarks.batch [RECIPE] [--repeats 5]`.

The same loaded model, arms in turn (A B, B A), no drafting unless the recipe drafts, the ratio of tokens a second pair by pair.
"""

from __future__ import annotations

import argparse
import statistics
import time

import attrs

import dspark

PROMPTS = (
    "Explain in a few sentences how bread rises.",
    "Describe a walk along a river in autumn.",
    "What should one pack for a week in the mountains?",
    "Tell a short story about a clock that runs backwards.",
)


def tokens_per_s(engine: dspark.Engine, groups: list[list[str]], length: int) -> float:
    """Generated tokens a second, end to end, over groups of prompts decoded together."""
    began, tokens = time.perf_counter(), 0
    for group in groups:
        with engine.open(group, max_tokens=length) as session:
            tokens += sum(len(row.tokens) for commit in session for row in commit.rows)
    return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="?", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--plain", action="store_true", help="no drafting in either arm")
    options = parser.parse_args()
    engine = dspark.load(options.recipe).bind()
    if options.plain:
        engine = attrs.evolve(engine, pipeline=attrs.evolve(engine.pipeline, draft=dspark.NoDraft()))
    together, apart = [list(PROMPTS)], [[prompt] for prompt in PROMPTS]
    for groups in (together, apart):
        tokens_per_s(engine, groups, 8)
    ratios = []
    for i in range(options.repeats):
        order = (together, apart) if i % 2 == 0 else (apart, together)
        speed = {len(groups): tokens_per_s(engine, groups, options.tokens) for groups in order}
        ratios.append(speed[1] / speed[4])
        print(f"together {speed[1]:6.2f} tokens/s, one by one {speed[4]:6.2f}, ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
