"""Hold a drafter's tensors against its config, and its config against a target."""

from __future__ import annotations

from typing import Any

import attrs

from dspark.checkpoints.dialects import Reading, Source
from dspark.errors import CheckpointError
from dspark.models.heads.shapes import parameter_shapes

# A target's table may be padded to a round number of rows beyond its tokens.
MAX_PADDING = 1024


@attrs.frozen
class TargetFacts:
    """What a drafter must fit. num_layers: layer calls of a forward; vocab_size: columns of its logits, padding included."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    model_type: str = ""
    name: str = "the target"

    @property
    def embedding_scale(self) -> float:
        """What the target's own embedding layer multiplies its raw rows by."""
        return self.hidden_size**0.5 if self.model_type.startswith("gemma") else 1.0


def facts_of(target: Any) -> TargetFacts:
    """The facts of a `dspark.models.target.Target`."""
    config = target.config
    text = config.get("text_config") or config
    kind = str(text.get("model_type") or config.get("model_type") or "")
    return TargetFacts(target.hidden_size, target.vocab_size, target.num_layers, kind, target.name)


def check_tensors(source: Source, reading: Reading) -> None:
    """Raise with every tensor that is missing, surplus or of another shape than the config asks for."""
    want, have = parameter_shapes(reading.config), reading.weights
    if reading.config.draft_vocab_size is not None:
        want["d2t"] = (reading.config.draft_vocab_size,)
    elif "d2t" in have:
        want["d2t"] = (reading.config.vocab_size,)
    faults = [f"{name} is missing" for name in want if name not in have]
    faults += [f"{_stored(reading, name)} is surplus" for name in have if name not in want]
    faults += [
        f"{_stored(reading, name)} has the shape {list(have[name].shape)} instead of {list(shape)}"
        for name, shape in want.items()
        if name in have and have[name].shape != shape
    ]
    faults += [
        f"{_stored(reading, name)} is packed, which a table or a linear with a bias may not be here"
        for name, weight in have.items()
        if weight.encoding != "plain" and not _may_be_packed(name, weight.encoding, want)
    ]
    if faults:
        raise CheckpointError(
            f"{source.path}: the tensors are not those of its config: {', '.join(faults)}; fetch the whole checkpoint, or take "
            "one of a packaging that docs/drafters.md lists"
        )


def _stored(reading: Reading, name: str) -> str:
    return reading.weights[name].stored[""]


def _may_be_packed(name: str, encoding: str, want: dict) -> bool:
    if not name.endswith("_proj.weight") and not name.endswith(("fc.weight", "markov_w2.weight", "lm_head.weight")):
        return encoding == "mlx" and name.endswith(
            ("embed_tokens.weight", "markov_w1.weight", "kernel_projection.weight")
        )
    return name.removesuffix(".weight") + ".bias" not in want


def check_fit(source: Source, reading: Reading, target: TargetFacts) -> None:
    """Raise where the drafter was made for a target of another width, depth or vocabulary."""
    config, faults = reading.config, []
    if config.target_hidden_size != target.hidden_size:
        faults.append(f"its taps are {config.target_hidden_size} wide and the target's layers {target.hidden_size}")
    borrows = "borrowed" in (config.embedding, config.lm_head)
    if borrows and config.hidden_size != target.hidden_size:
        faults.append(f"it borrows tables for a width of {config.hidden_size} and the target's is {target.hidden_size}")
    if not 0 <= target.vocab_size - config.vocab_size < MAX_PADDING:
        faults.append(f"its vocabulary has {config.vocab_size} tokens and the target's {target.vocab_size}")
    deepest, last = max(config.target_layer_ids), target.num_layers - 1
    if deepest > last or (deepest == last and not reading.raw_taps):
        what = "the last layer" if deepest == last else "layers that are not there"
        faults.append(f"it taps {list(config.target_layer_ids)}, {what} of a target with {target.num_layers}")
    if faults:
        raise CheckpointError(
            f"{source.path}: this drafter does not fit {target.name}: {'; '.join(faults)}; take one made for this target"
        )
