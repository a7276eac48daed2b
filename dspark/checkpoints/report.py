"""What `inspect` says of a drafter, from its headers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs

from dspark.checkpoints.dialects import Reading, Source
from dspark.models.heads.config import HeadConfig, RopeConfig


@attrs.frozen
class DrafterReport:
    """A drafter in words and numbers. `refused`: why it cannot be used, None when it can; then the rest is filled.

    drafts: most tokens a block drafts. tables: what it has itself and what it borrows. target: what its files say of the
    target it was made for. parameters: how many weights it holds itself.
    """

    path: Path
    packaging: str
    refused: str | None = None
    kind: str = ""
    slots: str = ""
    block_size: int = 0
    drafts: int = 0
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int = 0
    masks: tuple[str, ...] = ()
    rope: str = ""
    body: str = ""
    tables: str = ""
    vocabulary: str = ""
    heads: tuple[str, ...] = ()
    packed: str = ""
    parameters: int = 0
    target: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[tuple[str, str]]:
        """Label and text, in the order to print."""
        if self.refused:
            return [("packaging", self.packaging), ("refused", self.refused)]
        rows = [
            ("packaging", self.packaging),
            ("kind", self.kind),
            ("slots", self.slots),
            ("block", f"{self.block_size} slots, {self.drafts} drafts"),
            ("taps", f"layers {', '.join(map(str, self.target_layer_ids))}"),
            ("mask token", str(self.mask_token_id)),
            ("masks", "; ".join(self.masks)),
            ("rope", self.rope),
            ("body", self.body),
            ("tables", self.tables),
            ("vocabulary", self.vocabulary),
            ("heads", ", ".join(self.heads) or "none"),
            ("weights", f"{self.parameters / 1e6:,.1f} million, {self.packed}"),
            ("made for", ", ".join(f"{k} {v}" for k, v in self.target)),
        ]
        return rows + [("note", note) for note in self.notes]


def describe(source: Source, packaging: str, reading: Reading) -> DrafterReport:
    """The report of a drafter that was read and checked."""
    c = reading.config
    return DrafterReport(
        path=source.path,
        packaging=packaging,
        kind=c.kind,
        slots="anchor predicts" if c.anchor_predicts else "1+N: each slot predicts itself",
        block_size=c.block_size,
        drafts=c.num_drafts,
        target_layer_ids=c.target_layer_ids,
        mask_token_id=c.mask_token_id,
        masks=_masks(c),
        rope=_rope(c.rope, c.head_dim),
        body=(
            f"{len(c.layers)} layers, hidden {c.hidden_size}, MLP {c.intermediate_size}, "
            f"{c.num_heads}/{c.num_kv_heads} heads of {c.head_dim}"
        ),
        tables=f"embedding {c.embedding}, lm_head {c.lm_head}",
        vocabulary=f"{c.vocab_size}" if c.draft_vocab_size is None else f"{c.draft_vocab_size} of {c.vocab_size}",
        heads=_heads(c),
        packed=_packed(source, reading),
        parameters=sum(math.prod(w.shape) for name, w in reading.weights.items() if name != "d2t"),
        target=_target(source, c),
        notes=reading.notes,
    )


def _masks(c: HeadConfig) -> tuple[str, ...]:
    groups: list[tuple[str, list[int]]] = []
    for i, layer in enumerate(c.layers):
        text = ("causal" if layer.causal else "bidirectional") + (f", window {layer.window}" if layer.window else "")
        if groups and groups[-1][0] == text:
            groups[-1][1].append(i)
        else:
            groups.append((text, [i]))
    if len(groups) == 1:
        return (f"all layers {groups[0][0]}",)
    span = lambda ids: f"layer {ids[0]}" if len(ids) == 1 else f"layers {ids[0]} to {ids[-1]}"
    return tuple(f"{span(ids)} {text}" for text, ids in groups)


def _rope(rope: RopeConfig, head_dim: int) -> str:
    text = f"{'halves (neox)' if rope.style == 'neox' else 'neighbours (interleaved)'}, theta {rope.theta:g}"
    if rope.dims is not None and rope.dims < head_dim:
        text += f", {rope.dims} of {head_dim} dimensions"
    if rope.scaling != "none":
        text += f", {rope.scaling}" + (f" by {rope.factor:g}" if rope.factor != 1 else "")
    return text


def _heads(c: HeadConfig) -> tuple[str, ...]:
    found = []
    if c.markov != "none":
        found.append(f"Markov {c.markov} of rank {c.markov_rank}")
    if c.confidence != "none":
        found.append("confidence" + (" with the Markov embedding" if c.confidence == "markov" else ""))
    if c.selector_rank:
        found.append(f"selector of rank {c.selector_rank} over {c.selector_top_k} candidates")
    if c.conv_kernel:
        found.append(f"convolutions over {c.conv_kernel} slots")
    if c.log_snr is not None:
        found.append("log-SNR conditioning")
    if c.sinks:
        found.append("attention sinks")
    if c.logit_softcap is not None:
        found.append(f"soft cap {c.logit_softcap:g}")
    return tuple(found)


def _packed(source: Source, reading: Reading) -> str:
    encodings = {w.encoding for w in reading.weights.values()}
    for name, text in (("nvfp4", "part of them NVFP4"), ("mlx", "part of them packed by MLX")):
        if name in encodings:
            return text
    dtypes = {source.tensors[w.stored[""]].dtype for name, w in reading.weights.items() if name != "d2t"}
    return "stored as " + ", ".join(sorted(dtypes))


def _target(source: Source, c: HeadConfig) -> tuple[tuple[str, str], ...]:
    facts = [("width", str(c.target_hidden_size)), ("vocabulary", str(c.vocab_size))]
    config: dict[str, Any] = source.config
    for table in (config, config.get("dflash_config")):
        if isinstance(table, dict) and type(table.get("num_target_layers")) is int:
            facts.append(("layers", str(table["num_target_layers"])))
    inner = config.get("speculators_config")
    made_for = inner.get("verifier") if isinstance(inner, dict) else None
    if isinstance(made_for, dict) and isinstance(made_for.get("name_or_path"), str):
        facts.append(("repository", made_for["name_or_path"]))
    return tuple(facts)
