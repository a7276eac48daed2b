"""What a rejection costs on a hybrid of real width: `python -m benchmarks.rollback [--layers 24] [--hidden 1024]`.

Random weights, a block of 8 rows, rounds that keep all against rounds that keep half, in turn; for each plan that the model
allows. A re-feed is paid by the next block, so a rejected round is timed together with the round behind it, which keeps all.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx.core as mx

from dspark.buffers.plan import make_plan
from dspark.buffers.single import SingleBuffers
from dspark.models.target import Target

WIDTH = 8


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    target = hybrid(options.layers, options.hidden)
    for method in ("recurrence-replay", "checkpoint"):
        plan = make_plan(target.make_caches(), method, target.replays())
        buffers = SingleBuffers(target.make_caches(), plan)
        for keep in (WIDTH, WIDTH // 2):
            two_rounds(target, buffers, keep)
        times: dict[int, list[float]] = {WIDTH: [], WIDTH // 2: []}
        for i in range(options.repeats):
            for keep in (WIDTH, WIDTH // 2) if i % 2 == 0 else (WIDTH // 2, WIDTH):
                times[keep].append(two_rounds(target, buffers, keep))
        all_s, half_s = (statistics.median(times[k]) for k in (WIDTH, WIDTH // 2))
        # Two rounds are timed; the second is the same in both arms, but for what a re-feed adds to it.
        print(
            f"{plan.summary()}: two rounds {all_s * 1e3:.0f} ms, with a rejection {half_s * 1e3:.0f} ms; "
            f"a rejected round costs {(half_s - all_s / 2) / (all_s / 2):.2f} of an accepted one",
            flush=True,
        )


if __name__ == "__main__":
    main()
