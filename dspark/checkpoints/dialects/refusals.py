"""What is refused by name, before any dialect is asked: the reason, and what would work instead."""

from __future__ import annotations

from dspark.checkpoints.dialects.base import architecture, nested
from dspark.checkpoints.dialects.source import Source
from dspark.errors import CheckpointError

INSTEAD = "take a DSpark, DFlash or DFlash 2 drafter for this target"


def refuse_by_name(source: Source) -> None:
    """Raise for packagings that are known and not read."""
    if source.gguf is not None or "speculators_model_type" in source.config:
        return
    name, file = architecture(source), source.config_file
    if nested(source, "projector_type") == "domino" or any(
        t.endswith("prefix_gru.weight_ih_l0") for t in source.tensors
    ):
        raise CheckpointError(f"{file}: this is a Domino drafter (projector_type domino), which is not read; {INSTEAD}")
    if "eagle" in name.lower():
        raise CheckpointError(f"{file}: this is an EAGLE drafter ({name}), which drafts one token a step; {INSTEAD}")
    if _is_embedded(source, name):
        raise CheckpointError(
            f"{file}: this is a DeepSeek model with a DSpark drafter inside (dspark_* keys in the target's own config), which is "
            f"no drafter to be loaded alone; {INSTEAD}"
        )
    if name.startswith(("DFlashLaguna", "DFlashLLaguna")) or any("aux_hidden_norms." in t for t in source.tensors):
        raise CheckpointError(f"{file}: this is a Laguna DFlash drafter, whose gated attention is not read; {INSTEAD}")


def _is_embedded(source: Source, name: str) -> bool:
    model_type = source.config.get("model_type")
    if isinstance(model_type, str) and model_type.startswith("deepseek"):
        return any(key.startswith("dspark_") for key in source.config) or "DSpark" in name
    return name.startswith("Deepseek") and any(key.startswith("dspark_") for key in source.config)


def unknown(source: Source, known: tuple[str, ...]) -> CheckpointError:
    """The error for a folder that no dialect recognises."""
    name = architecture(source)
    if not name:
        return CheckpointError(
            f"{source.config_file}: it names no architecture and its tensors are no block drafter's; {INSTEAD}"
        )
    if "fc.weight" not in source.tensors and "model.fc.weight" not in source.tensors:
        return CheckpointError(f"{source.config_file}: {name} is a language model, not a block drafter; {INSTEAD}")
    return CheckpointError(
        f"{source.config_file}: the architecture {name!r} is no packaging of a block drafter that is read; "
        f"those are {', '.join(known)}"
    )
