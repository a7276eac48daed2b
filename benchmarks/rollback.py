"""What a rejection costs on a hybrid of real width: `python -m benchmarks.rollback [--layers 24] [--hidden 1024] [--kernels]`.

Random weights, a block of 8 rows, rounds that keep all against rounds that keep half, in turn; for each plan that the model
allows. A re-feed is paid by the next block, so a rejected round is timed together with the round behind it, which keeps all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import mlx.core as mx

from dspark.buffers.plan import make_plan
from dspark.buffers.single import SingleBuffers
from dspark.kernels.enable import enable
from dspark.models.target import Target

WIDTH = 8
METHODS = ("recurrence-replay", "checkpoint")
# Pairs of rounds that are not counted: they compile.
WARMUP = 2


def hybrid(layers: int, hidden: int) -> Target:
    """A qwen3_5-like model: three gated-delta layers to one of attention."""
    from mlx_lm.models import qwen3_5

    text = {
        "model_type": "qwen3_5",
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(hidden // 512, 1),
        "head_dim": 128,
        "vocab_size": 4096,
        "rms_norm_eps": 1e-6,
        "linear_num_value_heads": hidden // 128,
        "linear_num_key_heads": hidden // 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25, "rope_type": "default"},
    }
    model = qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=text))
    if mx.default_device().type == mx.DeviceType.gpu:
        model.set_dtype(mx.bfloat16)
    # As a loader leaves it: in training, models use no kernels for recurrences.
    model.eval()
    mx.eval(model.parameters())
    return Target(model, text, "hybrid")


def two_rounds(target: Target, buffers: SingleBuffers, keep: int) -> float:
    """Seconds of a round that keeps `keep` rows and of one that keeps all."""
    block = mx.array([[7, 11, 13, 17, 19, 23, 29, 31]])
    fed = (tuple(block[0].tolist()),)  # type: ignore[arg-type]
    began = time.perf_counter()
    for kept in (keep, WIDTH):
        logits, _ = buffers.forward(target, block)
        mx.eval(logits)
        buffers.settle((kept,), fed)
        mx.eval(buffers.state)
    return time.perf_counter() - began


def compare(target: Target, methods: tuple[str, ...] = METHODS, repeats: int = 9) -> Iterator[str]:
    """Each plan's two figures, as a line. All plans take turns, so that what a context's length costs once is no plan's."""
    plans = {method: make_plan(target.make_caches(), method, target.replays()) for method in methods}
    buffers = {method: SingleBuffers(target.make_caches(), plan) for method, plan in plans.items()}
    arms = [(method, keep) for method in methods for keep in (WIDTH, WIDTH // 2)]
    times: dict[tuple[str, int], list[float]] = {arm: [] for arm in arms}
    for i in range(repeats + WARMUP):
        for method, keep in arms if i % 2 == 0 else reversed(arms):
            took = two_rounds(target, buffers[method], keep)
            if i >= WARMUP:
                times[method, keep].append(took)
    for method, plan in plans.items():
        all_s, half_s = (statistics.median(times[method, keep]) for keep in (WIDTH, WIDTH // 2))
        # Two rounds are timed; the second is the same in both arms, but for what a re-feed adds to it.
        yield (
            f"{plan.summary()}: two rounds {all_s * 1e3:.1f} ms, with a rejection {half_s * 1e3:.1f} ms; "
            f"a rejected round costs {(half_s - all_s / 2) / (all_s / 2):.2f} of an accepted one"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--kernels", action="store_true", help="with the kernels that this machine found right and faster"
    )
    options = parser.parse_args()
    target = hybrid(options.layers, options.hidden)
    if options.kernels:
        kernels = enable(target.model, WIDTH)
        print("\n".join(["no kernels for this model here"] if kernels is None else kernels.lines()))
    for line in compare(target, repeats=options.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
