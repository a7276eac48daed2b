"""Tiny targets for the kernel that runs a whole forward in one launch (dspark/kernels/stack.cu), and what it is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models import qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

from dspark.kernels import stack
from tests.precompiled_kernel import in_place, stand_in

TAPPED = (1, 0)
# The inputs that the kernel writes into: its scratch and the caches' buffer.
WRITTEN = (3, 5)
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


class Case(NamedTuple):
    """A target and how its kernel is laid out."""

    module: Any
    dtype: mx.Dtype
    tied: bool
    warps: int
    splits: int
    blocks: int
    quantised: bool = False
    # All weights packed in so many bits, and held in 8 by the kernel: with one scale for each `group` columns.
    bits: int = 0
    group: int = 32
    scaled: bool = False
    hidden: int = 64
    heads: int = 4
    mlp: int = 96
    vocab: int = 150
    # Whether each token has another one that is like it.
    twins: bool = False
    # Bytes of a block's memory: few, so that x comes in parts.
    memory: int = stack.MEMORY
    # Whether hidden states are large for 16-bit floats, and their norms' weights above one.
    loud: bool = False


def target(case: Case, **other: Any) -> Any:
    """A model of two layers whose numbers are large enough to matter. Its eps is: a forward without it is far off."""
    dim = 128 if case.module is qwen3 else 64
    given: dict[str, Any] = {
        "model_type": case.module.__name__.split(".")[-1],
        "hidden_size": case.hidden,
        "num_hidden_layers": 2,
        "intermediate_size": case.mlp,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.heads // 2,
        "head_dim": dim,
        "rms_norm_eps": 0.05,
        "vocab_size": case.vocab,
        "tie_word_embeddings": case.tied,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "rope_scaling": {**SCALED, "original_max_position_embeddings": 64} if case.scaled else None,
        **other,
    }
    model = case.module.Model(case.module.ModelArgs.from_dict(given))
    mx.random.seed(3)
    # A norm's weights are around one, a matrix's around zero.
    model.update(tree_map(lambda a: 0.15 * mx.random.normal(a.shape) + float(a.ndim == 1), model.parameters()))
    if case.twins:
        half = case.vocab // 2
        model.model.embed_tokens.weight = mx.tile(model.model.embed_tokens.weight[:half], (2, 1))
    if case.loud:
        model.model.embed_tokens.weight *= 3e4 / mx.abs(model.model.embed_tokens.weight).max()
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight *= 4.0
    if case.quantised or case.bits:
        how = lambda path, module: (
            hasattr(module, "to_quantized")
            and {
                "group_size": case.group,
                "bits": case.bits or (8 if "embed" in path else 4),
            }
        )
        nn.quantize(model, class_predicate=how)
    model.set_dtype(case.dtype)
    return model


def exactly(model: Any) -> Any:
    """The same numbers, with float32 arithmetic."""
    other = copy.deepcopy(model)
    other.set_dtype(mx.float32)
    return other


class Trial(NamedTuple):
    """Forwards behind `depth` tokens, of as many rows each as `widths` says. context: keys and values of each cache; exact: the
    `numbers` of each forward by float32 arithmetic; own: by MLX, with 16-bit numbers."""

    case: Case
    model: Any
    tokens: mx.array
    context: list[mx.array]
    depth: int
    widths: tuple[int, ...]
    exact: list[list[np.ndarray]]
    own: list[list[np.ndarray]]

    def caches(self, dtype: mx.Dtype | None = None) -> list[KVCache]:
        """Caches that hold the context, with some room behind it."""
        made = [KVCache(), KVCache()]
        arrays = [mx.pad(a.astype(dtype or a.dtype), [(0, 0), (0, 0), (0, 40), (0, 0)]) for a in self.context]
        mx.eval(arrays)
        for i, cache in enumerate(made):
            cache.state = arrays[2 * i], arrays[2 * i + 1], self.depth
        return made


@lru_cache(None)
def trial(case: Case, depth: int, widths: tuple[int, ...]) -> Trial:
    model = target(case)
    tokens = mx.array(np.random.RandomState(0).randint(0, case.vocab, (1, depth + sum(widths))))
    caches = make_prompt_cache(model)
    model(tokens[:, :depth], cache=caches)
    made = Trial(case, model, tokens, [a for c in caches for a in c.keys_and_values()], depth, widths, [], [])
    for other, dtype, out in ((exactly(model), mx.float32, made.exact), (model, case.dtype, made.own)):
        caches = made.caches(dtype)
        out += [numbers(*plain(other, ids, caches), caches) for ids in parts(made)]
    return made


def parts(trial: Trial) -> list[mx.array]:
    ends = trial.depth + np.cumsum((0, *trial.widths))
    return [trial.tokens[:, int(a) : int(b)] for a, b in pairwise(ends)]


def plain(model: Any, ids: mx.array, caches: list[KVCache]) -> tuple[mx.array, mx.array]:
    """Logits and taps by MLX."""
    body, outs = model.model, []
    h = body.embed_tokens(ids)
    mask = create_attention_mask(h, caches[0])
    for layer, cache in zip(body.layers, caches, strict=True):
        h = layer(h, mask, cache=cache)
        outs.append(h)
    h = body.norm(h)
    logits = body.embed_tokens.as_linear(h) if model.args.tie_word_embeddings else model.lm_head(h)
    return logits, mx.concatenate([outs[i] for i in TAPPED], axis=-1)


def numbers(logits: mx.array, taps: mx.array, caches: list[KVCache]) -> list[np.ndarray]:
    """What a forward gives and writes, each a row of numbers for a row of tokens: logits, taps, keys and values of each cache."""
    rows = logits.shape[1]
    written = [a[0, :, -rows:].swapaxes(0, 1).reshape(rows, -1) for c in caches for a in c.keys_and_values()]
    return [np.array(a.astype(mx.float32)) for a in (logits[0], taps[0], *written)]


def forward(case: Case, model: Any, kernel: Callable[[stack.Stack], Any] | None = None) -> stack.Forward:
    """The kernel's forwards, through its stand-in."""
    found = stack.study(model)
    assert isinstance(found, stack.Stack), found
    kept = {"bits": 8} if case.bits else {}
    made = stack.Forward(
        model, found._replace(warps=case.warps, splits=case.splits, memory=case.memory, **kept), case.blocks
    )
    kernels: dict[stack.Stack, Any] = {}

    def chosen(rows: int, tapped: tuple[int, ...]) -> tuple[stack.Stack, Any]:
        kind = made.stack._replace(tapped=tapped, cols=1 if rows <= 8 else 2)
        if kind not in kernels:
            kernels[kind] = (kernel or compiled)(kind)
        return kind, kernels[kind]

    made.kernel = chosen
    return made


def compiled(kind: stack.Stack) -> Any:
    return stand_in(stack.program(kind), written=WRITTEN)


def buffers(caches: list[KVCache]) -> list[mx.array]:
    return [a for cache in caches for a in (cache.keys, cache.values)]


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16)).copy()


def untouched(old: list[np.ndarray], caches: list[KVCache], held: int) -> bool:
    """Whether buffers are what they were, but for the rows behind `held` that the caches hold now; grown ones have zeros behind."""
    for before, after in zip(old, map(bits, buffers(caches)), strict=True):
        want = before.copy() if before.shape == after.shape else np.zeros_like(after)
        want[:, :, :held] = before[:, :, :held]
        want[:, :, held : caches[0].offset] = after[:, :, held : caches[0].offset]
        if not np.array_equal(want, after):
            return False
    return True


def spoil(caches: list[KVCache]) -> None:
    """No numbers behind what is held, in the buffers' own memory."""
    for array in buffers(caches):
        spoilt = bits(array)
        spoilt[:, :, caches[0].offset :] = 0x7FFF
        in_place(array, spoilt)


def errors(made: list[np.ndarray], exact: list[np.ndarray], own: list[np.ndarray]) -> list[float]:
    """Of each of `numbers`, the largest error of a row, in errors of MLX's own forward over all rows: both root mean squares."""
    found = []
    for a, b, c in zip(made, exact, own, strict=True):
        far = np.sqrt(np.square(a - b).mean(-1)).max() / np.sqrt(np.square(c - b).mean())
        found.append(np.inf if np.isnan(far) else float(far))
    return found


def greedy(ids: mx.array, logits: mx.array, said: Any) -> bool:
    """Whether this is what greedy decoding says of logits: of equal ones the first is meant."""
    drafts = np.array(ids)[0, 1:].tolist()
    choice = np.array(logits.astype(mx.float32))[0].argmax(-1).tolist()
    standing = [a == b for a, b in zip(choice, [*drafts, -1], strict=True)].index(False)
    want = [choice], [standing], [choice[standing]], [[standing, choice[standing], *drafts]]
    words = [number for word in said.words for number in word.tolist()]
    told = len(said.words) == len(want[3][0]) // 2 + len(want[3][0]) % 2 and words[: len(want[3][0])] == want[3][0]
    return told and all(a.tolist() == b for a, b in zip(said[:4], want, strict=True))


def drafted(t: Trial, rows: int, wrong: int) -> mx.array:
    """Ids [1, rows] behind a trial's context: the first is one of its own, the others are drafts, all but one of them what greedy
    decoding says in front of them. wrong: how many drafts stand."""
    caches, ids = t.caches(), [int(t.tokens[0, t.depth].item())]
    while len(ids) < rows:
        best = int(mx.argmax(plain(t.model, mx.array([ids[-1:]]), caches)[0][0, -1]).item())
        ids.append(best if len(ids) != wrong + 1 else (best + 1) % t.case.vocab)
    return mx.array([ids])


def worst(t: Trial, way: stack.Forward, enough: float = np.inf) -> float:
    """The largest of `errors` in a trial; infinite where anything is written that is not new, and where what is said of the logits
    is not so. Stops at the first above `enough`."""
    caches, most = t.caches(), 0.0
    for ids, exact, own in zip(parts(t), t.exact, t.own, strict=True):
        held = caches[0].offset
        spoil(caches)
        before = [bits(a) for a in buffers(caches)]
        logits, taps = way(ids, caches, TAPPED)
        most = max(most, *errors(numbers(logits, taps, caches), exact, own))
        if not untouched(before, caches, held) or not greedy(ids, logits, way.said(logits)):
            most = np.inf
        if most > enough:
            break
    return most
