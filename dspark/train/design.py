"""From a recipe and a target to a drafter network: sizes follow the target where the recipe says nothing."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from dspark.errors import InputError
from dspark.models.heads.config import HeadConfig, LayerConfig, RopeConfig
from dspark.models.heads.head import Head
from dspark.models.target import Target, text_config
from dspark.train.losses import Mix
from dspark.train.recipe import SPREAD_TAPS, DrafterTable, OptimiserTable

INIT_SCALE = 0.02


def spread(num_layers: int, count: int = SPREAD_TAPS) -> tuple[int, ...]:
    """`count` layers, evenly from 1 to three before the last, as DFlash and DSpark place their taps."""
    if num_layers < count + 3:
        return tuple(range(max(1, num_layers - 1)))[:count]
    return tuple(int(1 + i * (num_layers - 4) / (count - 1) + 0.5) for i in range(count))


def design(table: DrafterTable, target: Target, mask_token_id: int) -> HeadConfig:
    """The network. Raises InputError for taps that the target does not have."""
    said = text_config(target.config)
    hidden = target.hidden_size
    heads = int(said.get("num_attention_heads") or max(1, hidden // 64))
    taps = spread(target.num_layers) if table.taps == "spread" else tuple(table.taps)
    if not taps or min(taps) < 0 or max(taps) >= target.num_layers - 1:
        raise InputError(
            f"taps is {list(taps)}; layers of {target.name} are 0 to {target.num_layers - 2}, the last one is never tapped"
        )
    head_dim = int(said.get("head_dim") or hidden // heads)
    kind: dict[str, Any] = {}
    if table.kind == "dspark" and table.markov_rank:
        kind = {"markov": "vanilla", "markov_rank": table.markov_rank}
    if table.kind == "dspark" and table.confidence:
        kind["confidence"] = "markov" if table.markov_rank else "hidden"
    if table.kind == "dflash2":
        kind = {"conv_kernel": table.conv_kernel, "conv_group": table.conv_group}
        kind |= {"selector_rank": table.selector_rank, "selector_top_k": min(table.selector_top_k, target.vocab_size)}
    return HeadConfig(
        kind=table.kind,
        block_size=table.block,
        anchor_predicts=table.kind == "dspark",
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=int(table.intermediate or said.get("intermediate_size") or 4 * hidden),
        num_heads=heads,
        num_kv_heads=int(said.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        layers=(LayerConfig(),) * table.layers,
        target_hidden_size=hidden,
        rms_norm_eps=float(said.get("rms_norm_eps") or 1e-6),
        rope=RopeConfig(theta=_theta(said)),
        draft_vocab_size=table.draft_vocab,
        **kind,
    )


def _theta(said: dict[str, Any]) -> float:
    nested = said.get("rope_parameters")
    theta = nested.get("rope_theta") if isinstance(nested, dict) else None
    return float(theta or said.get("rope_theta") or 10000.0)


def mask_token(tokenizer: Any, asked: int | None, vocab_size: int) -> int:
    """The token that stands for a slot to be guessed: the recipe's, else the last special token that chats do not use."""
    if asked is not None:
        if asked >= vocab_size:
            raise InputError(f"mask_token_id is {asked}; the vocabulary has {vocab_size} tokens")
        return asked
    template = str(getattr(tokenizer, "chat_template", "") or "")
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    added = getattr(inner, "added_tokens_decoder", {})
    ends = {int(t) for t in tokenizer.eos_token_ids} | {
        getattr(inner, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    }
    free = [i for i, t in added.items() if i not in ends and i < vocab_size and str(t) not in template]
    if not free:
        raise InputError("this tokenizer has no spare special token: name one as [drafter] mask_token_id")
    return max(free)


def new_head(config: HeadConfig, seed: int) -> Head:
    """A drafter as training starts it: normal weights of scale 0.02, norms at 1, convolutions the identity."""
    keys = iter(mx.random.split(mx.random.key(seed), 4096))
    head = Head(config)

    def start(path: str, array: mx.array) -> mx.array:
        if path.endswith(("norm.weight", "base_kernel")):
            return array
        if "kernel_projection" in path or path.endswith("bias"):
            return mx.zeros_like(array)
        return mx.random.normal(array.shape, scale=INIT_SCALE, key=next(keys))

    head.update(tree_map_with_path(start, head.parameters()))
    mx.eval(head.parameters())
    return head


def count_parameters(head: Head) -> int:
    return sum(array.size for _, array in tree_flatten(head.parameters()))


def mix_of(kind: str, block: int, table: OptimiserTable) -> Mix:
    """The losses' weights: the recipe's, else the published ones of the kind."""
    terms = (table.ce, table.l1, table.kl)
    given = any(term is not None for term in terms)
    published = {"dspark": (0.1, 0.9, 0.0), "dflash": (1.0, 0.0, 0.0), "dflash2": (0.0, 0.0, 1.0)}[kind]
    ce, l1, kl = (term or 0.0 for term in terms) if given else published
    gamma = table.gamma or (7.0 if kind == "dflash" and block > 8 else 4.0)
    return Mix(ce, l1, kl, table.confidence_weight, table.selector_weight, gamma)
