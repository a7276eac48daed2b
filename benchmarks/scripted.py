"""Where a round goes on a target of real size without its weights: `python -m benchmarks.scripted qwen3-8b` (or `smollm2-135m`).

The target has the shapes of the model named and random quantised weights; the drafter is a DSpark head of five layers with
random weights, which runs in full, but whose tokens are replaced by the target's own next ones, each spoilt with probability
1 - rate. So a round does all its work at an acceptance that is set, and what it says is still checked against plain decoding.
Nothing is downloaded. On an NVIDIA GPU our kernels are probed and used as in any session (`--stock`: they are not).

`--candidates`: then ways to send a round that are not in the package are tried in turn.

Options: --bits, --cap, --rate, --context (tokens of prompt), --tokens (of an answer), --repeats, --tiny (to see it run).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from itertools import pairwise
from typing import Any

import attrs

import dspark
from dspark.blas import open_blas

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "rope_theta": 1e6,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 1e5,
    },
}  # fmt: skip
TINY = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2} | {
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512
}  # fmt: skip
GROUP, WIDTHS = {4: 32, 8: 64}, (1, 2, 4, 8, 16)


def random_model(shape: dict[str, Any], bits: int, seed: int = 3) -> Any:
    """A model of this shape whose quantised weights are random, but for its head: that says of each token another one, by far the
    likeliest, so that rounding decides nothing and a script can tell what will be said. The head has a table of its own."""
    from importlib import import_module

    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_map_with_path

    mx.random.seed(seed)
    dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else mx.bfloat16
    module = import_module(f"mlx_lm.models.{shape['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(shape | {"tie_word_embeddings": False}))
    nn.quantize(model, group_size=GROUP[bits], bits=bits)
    half = (2**bits - 1) / 2

    def filled(path: str, array: mx.array) -> mx.array:
        if array.dtype == mx.uint32:
            low, high = (mx.random.randint(0, 1 << 16, array.shape).astype(mx.uint32) for _ in range(2))
            return (high << 16) | low
        if path.endswith("scales"):
            usual = 3.5 / 2**bits / (array.shape[1] * GROUP[bits]) ** 0.5
            return (mx.random.uniform(0.5, 1.5, array.shape) * usual).astype(dtype)
        return array if path.endswith("biases") else mx.ones(array.shape, dtype)

    model.update(tree_map_with_path(filled, model.parameters()))
    for _, part in model.named_modules():
        if "biases" in part:
            part.biases = (part.scales.astype(mx.float32) * -half).astype(dtype)
        mx.eval(part.parameters())
    _say_another(model, bits, seed)
    model.eval()
    return model


def _say_another(model: Any, bits: int, seed: int) -> None:
    """Make the head's rows those of the embedding in another order, and the embedding louder than what layers add to it."""
    import mlx.core as mx

    embedding, head = model.model.embed_tokens, model.lm_head
    rows, columns = embedding.weight.shape[0], embedding.scales.shape[1] * GROUP[bits]
    key = mx.random.key(seed)
    table = mx.random.normal((rows, columns), dtype=mx.bfloat16, key=key)
    order = mx.roll(mx.arange(rows), 7919)
    for part, loud, values in ((embedding, 30.0, table), (head, columns**-0.5, table[order])):
        packed = mx.quantize((values * loud).astype(embedding.scales.dtype), group_size=GROUP[bits], bits=bits)
        part.weight, part.scales, part.biases = packed
        mx.eval(part.parameters())


def random_head(target: Any, shape: dict[str, Any]) -> Any:
    """A DSpark head of five layers and seven slots for it, packed to 4 bits."""
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_map

    from dspark.models.heads import Head, HeadConfig, LayerConfig
    from dspark.models.lending import lend

    layers = shape["num_hidden_layers"]
    config = HeadConfig(
        kind="dspark",
        markov="vanilla",
        markov_rank=64 if shape["hidden_size"] < 1024 else 256,
        block_size=7,
        anchor_predicts=True,
        mask_token_id=16,
        target_layer_ids=tuple(sorted({1, layers // 4, layers // 2, 3 * layers // 4, layers - 2})),
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        layers=(LayerConfig(),) * 5,
        target_hidden_size=shape["hidden_size"],
    )
    head = Head(config)
    dtype = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else mx.bfloat16
    head.update(tree_map(lambda array: array.astype(dtype), head.parameters()))
    nn.quantize(head, group_size=32, bits=4, class_predicate=lambda _, part: isinstance(part, nn.Linear))
    mx.eval(head.parameters())
    head.eval()
    lend(head, target)
    return head


def scripted_stage(inner: Any, truth: tuple[int, ...], rate: float) -> Any:
    """A draft stage that runs `inner` and says `truth`, the whole text, in its place."""
    import mlx.core as mx

    from dspark.stages.base import AbstractDraft

    @attrs.frozen(eq=False)
    class Scripted(AbstractDraft):
        @property
        def target_layer_ids(self) -> tuple[int, ...]:
            return inner.target_layer_ids

        @property
        def longest(self) -> int:
            return inner.longest

        @property
        def sources(self) -> tuple[str, ...]:
            return ("scripted",)

        def init(self, opening: Any) -> Any:
            return inner.init(opening)

        def skip(self, settled: Any, carry: Any) -> Any:
            return inner.skip(settled, carry)

        def pending(self, carry: Any) -> Any:
            return inner.pending(carry)

        def __call__(self, settled: Any, carry: Any, cap: int) -> tuple[Any, Any]:
            proposal, carry = inner(settled, carry, cap)
            at = settled.start[0] + 1
            chance, width = random.Random(at), proposal.tokens.shape[1]
            said = [t if chance.random() < rate else (t + 1) % 500 for t in (*truth[at : at + width], *[0] * width)][
                :width
            ]
            # The head's own tokens are waited for, and count for nothing.
            tokens = mx.array([said], dtype=mx.int32) + 0 * proposal.tokens
            return proposal._replace(tokens=tokens, q=None, source=self.sources), carry

    return Scripted()


def engine_of(target: Any, draft: Any, cap: int) -> Any:
    from dspark.engine import bind

    stages = dspark.Prefill(), draft, dspark.Verify(), dspark.Greedy(), dspark.rollback_auto()
    return bind(dspark.chain(*stages, cap=cap), target)


def answer(engine: Any, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    with engine.open(prompt, max_tokens=length) as session:
        for _ in session:
            pass
    return session.result.tokens


def whole_ms(engine: Any, prompt: tuple[int, ...], length: int) -> float:
    """Milliseconds a token of a session that nobody watches, prefill and first tokens left out."""
    ends, tokens = [], []
    with engine.open(prompt, max_tokens=length) as session:
        for commit in session:
            ends.append(time.perf_counter())
            tokens.append(len(commit.rows[0].tokens))
    return (ends[-1] - ends[2]) / max(sum(tokens[3:]), 1) * 1000


def mlx_lm_ms(model: Any, prompt: tuple[int, ...], length: int) -> float:
    """Milliseconds of a step of mlx_lm's own loop."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    ends = []
    for _ in generate_step(mx.array(prompt), model, max_tokens=length):
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(ends[4:])) * 1000


def verify_ms(engine: Any, depth: int, repeats: int) -> dict[int, float]:
    """Milliseconds of a forward read back, by rows, medians of runs in turn."""
    from dspark.calibrate.bench import Bench, Dummy

    bench = Bench(engine, attrs.evolve(engine.pipeline, draft=Dummy()), depth)
    took: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for repeat in range(repeats + 2):
        for width, found in took.items():
            ms = bench.verify(width)
            if repeat > 1:
                found.append(ms)
    return {width: statistics.median(found) for width, found in took.items()}


def said_alike(target: Any, prompt: tuple[int, ...], plain: tuple[int, ...], drafted: tuple[int, ...]) -> str:
    from dspark.bench.same import first_divergence, gap_behind

    found = first_divergence(plain, drafted)
    if found is None:
        return f"text: all {len(plain)} tokens are those of plain decoding"
    gap = gap_behind(target, prompt + plain[: found.at])
    verdict = "a near-tie" if gap.near_tie(found) else "NOT explained by rounding"
    return (
        f"text: differs from plain decoding at token {found.at + 1}, where the two likeliest are {gap.gap:.2g} apart and "
        f"rounding moves logits by {gap.noise:.2g}: {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--bits", type=int, choices=GROUP, default=8)
    parser.add_argument("--cap", type=int, default=7)
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--candidates", action="store_true")
    report(parser.parse_args())


def try_candidates(target: Any, engine: Any, prompt: tuple[int, ...], options: argparse.Namespace) -> None:
    """Rounds of the usual width sent in other ways, in turn, milliseconds by part."""
    from benchmarks.candidates import candidates
    from dspark.bench.profile import PARTS, middle, watched, whole

    ways = candidates(target)
    rounds: dict[str, list[Any]] = {name: [] for name in ways}
    for repeat in range(max(options.repeats - 1, 1)):
        for name in list(ways)[:: 1 if repeat % 2 == 0 else -1]:
            with ways[name]():
                rounds[name] += watched(engine, prompt, options.tokens)
    print("\nrounds sent in other ways")
    for name, found in rounds.items():
        flowing = [r for r in found if not r.apart and r.width == options.cap + 1]
        parts = ", ".join(f"{part} {ms:.2f}" for part, ms in middle(flowing).items() if part in PARTS[:5])
        print(f"  {name:28} {whole(flowing) or 0:8.3f} ms of {len(flowing)} rounds: {parts}")


def report(options: argparse.Namespace) -> None:
    open_blas()
    from dspark.bench.profile import Profile, watched
    from dspark.bench.profile_words import profile_lines
    from dspark.calibrate.bandwidth import floor_ms
    from dspark.kernels import launches
    from dspark.kernels.enable import enable
    from dspark.models.target import Target
    from dspark.platform import backend, machine
    from dspark.stages.draft.block import BlockDraft, DSpark

    tell = lambda text: print(f"  {text}", flush=True)
    shape = SHAPES[options.shape] | (TINY if options.tiny else {})
    model = random_model(shape, options.bits)
    target, here, kind = Target(model, shape, options.shape), machine(), backend()
    print(
        f"{here.chip}, {here.backend}, mlx {here.mlx}; {options.shape} in {options.bits} bits, random weights",
        flush=True,
    )
    kernels = None
    if not options.stock and kind != "cpu":
        kernels = enable(model, options.cap + 1, say=tell, launches=launches.enable(target, say=tell))
    head = random_head(target, shape)
    if kernels is not None:
        kernels.enable_head(head, head.config.block_size)
    for line in () if kernels is None else kernels.lines():
        tell(line)
    inner = BlockDraft(DSpark("random"), head)
    prompt = tuple((i * i * 7919 + 31 * i + 100) % min(shape["vocab_size"], 20000) for i in range(options.context))
    plain = engine_of(target, dspark.NoDraft(), 0)
    text = answer(plain, prompt, options.tokens)
    truth = (*prompt, *answer(plain, prompt, options.tokens + inner.longest + 1))
    drafted = engine_of(target, scripted_stage(inner, truth, options.rate), options.cap)
    print(said_alike(target, prompt, text, answer(drafted, prompt, options.tokens)), flush=True)
    rounds: dict[str, list[Any]] = {"drafted": [], "plain": []}
    theirs, alone, together = [], [], []
    for _ in range(options.repeats):
        rounds["plain"] += watched(plain, prompt, options.tokens)
        theirs.append(mlx_lm_ms(model, prompt, options.tokens))
        alone.append(whole_ms(plain, prompt, options.tokens))
        together.append(whole_ms(drafted, prompt, options.tokens))
        rounds["drafted"] += watched(drafted, prompt, options.tokens)
    widths = verify_ms(plain, options.context, 3 if options.tiny else 15)
    floor = floor_ms(target, kind)
    print("a forward read back, by rows: " + ", ".join(f"{w}: {ms:.2f} ms" for w, ms in widths.items()))
    if floor is not None:
        print(f"reading all weights once at copy bandwidth: {floor:.2f} ms")
    print(f"a step of mlx_lm: {statistics.median(theirs):.2f} ms ({min(theirs):.2f} to {max(theirs):.2f})")
    found = Profile(tuple(r for r in rounds["drafted"] if r.offered), (), tuple(rounds["plain"]))
    print("\n".join(profile_lines(found)))
    if options.candidates:
        try_candidates(target, drafted, prompt, options)
    print("\nmilliseconds a token, nobody watching, medians and ranges:")
    for name, took in (("mlx_lm", theirs), ("plain", alone), ("drafted", together)):
        print(f"  {name:8} {statistics.median(took):7.2f} ({min(took):.2f} to {max(took):.2f})")
    ratios = [a / b for a, b in zip(theirs, together, strict=True)]
    print(
        f"drafted decoding is {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times mlx_lm at an "
        f"acceptance of {options.rate}"
    )


if __name__ == "__main__":
    main()
