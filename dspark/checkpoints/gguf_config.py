"""Translate the metadata of a GGUF file into the config.json that mlx-lm would read for the same model."""

from __future__ import annotations

from typing import Any

from dspark.checkpoints.gguf_header import GgufHeader
from dspark.errors import CheckpointError, did_you_mean

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Frequencies of a long-context rope, worked out by whoever wrote the file; no parameter of the model.
ROPE_FACTORS = "rope_freqs.weight"
MAX_LAYERS = 1024


def read_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json that mlx-lm would read for this model; raises `CheckpointError` for what cannot be read."""
    fields = _Fields(header)
    kind = fields.architecture()
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": fields.count("block_count", limit=MAX_LAYERS),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "max_position_embeddings": fields.count("context_length"),
        "vocab_size": fields.rows("token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    fields.refuse_unlike("attention.value_length", head_dim)
    fields.refuse_unlike("rope.dimension_count", head_dim)
    fields.refuse_unlike("expert_count", 0)
    if kind == "qwen2" and head_dim * heads != hidden:
        raise fields.fault(f"attention.key_length is {head_dim}; {hidden} / {heads} is what qwen2 allows")
    if scaling := fields.rope_scaling():
        config["rope_scaling"] = scaling
    return config


class _Fields:
    """The metadata keys of the file's own architecture, each checked as it is read."""

    def __init__(self, header: GgufHeader):
        self.header, self.kind = header, header.metadata.get("general.architecture")

    def architecture(self) -> str:
        if self.header.metadata.get("split.count", 1) not in (0, 1):
            raise self.fault("it is one part of a split model; merge the parts first (llama-gguf-split --merge)", "")
        if self.kind not in ARCHITECTURES:
            hint = did_you_mean(self.kind, ARCHITECTURES)
            raise self.fault(
                f"its architecture is {self.kind!r}; as GGUF {', '.join(ARCHITECTURES)} can be read{hint}; use the "
                "model's safetensors repository instead",
                "",
            )
        return str(self.kind)

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.kind}.{key}")

    def count(self, key: str, default: int | None = None, limit: int = 1 << 24) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise self.fault(f"{key} is {value!r}; a whole number from 1 to {limit} is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.fault(f"{key} is {value!r}; a number above 0 is needed")
        return float(value)

    def rows(self, name: str) -> int:
        if name not in self.header.tensors:
            raise self.fault(f"the tensor {name!r} is missing", "")
        return self.header.tensors[name].shape[0]

    def refuse_unlike(self, key: str, wanted: int) -> None:
        if (value := self.get(key)) not in (None, wanted):
            raise self.fault(f"{key} is {value!r}; only {wanted} can be read")

    def rope_scaling(self) -> dict[str, Any] | None:
        kind = self.get("rope.scaling.type")
        if ROPE_FACTORS in self.header.tensors:
            # `_set_rope` puts the file's own frequencies in; these values only choose the class.
            return {"rope_type": "llama3", "factor": 1.0, "original_max_position_embeddings": 8192}
        if kind in (None, "none"):
            return None
        if kind == "linear":
            return {"type": "linear", "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            original = self.count("rope.scaling.original_context_length")
            factor = self.number("rope.scaling.factor")
            return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        raise self.fault(f"rope.scaling.type is {kind!r}; allowed linear, none, yarn")

    def fault(self, text: str, prefix: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.header.path}: {f'{self.kind}.' if prefix is None else prefix}{text}")
