"""The drafters that are published, as far as their configs are known: what each packaging looks like at its real size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.drafter_files import Shapes, body, dflash2, markov, nvfp4, sizes, tables, typed, write_headers


class Published(NamedTuple):
    """A drafter's config and tensors, and what must be read from them."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    packaging: str
    kind: str
    anchor: bool
    drafts: int
    taps: tuple[int, ...]
    masks: tuple[str, ...] = ("all layers bidirectional",)
    rope: str = "halves (neox), theta 1e+06"
    tables: str = "embedding borrowed, lm_head borrowed"
    heads: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        return write_headers(folder, self.config, self.tensors)


PUBLISHED: dict[str, Callable[[], Published]] = {}
MARKOV = ("Markov vanilla of rank 256", "confidence with the Markov embedding")
FIVE = (1, 9, 17, 25, 33)


def published(name: str):
    def keep(make: Callable[[], Published]) -> Callable[[], Published]:
        PUBLISHED[name] = make
        return make

    return keep


def qwen3_4b() -> tuple[dict[str, Any], Shapes]:
    h, i, heads, v = 2560, 9728, (32, 8, 128), 151936
    config = sizes(
        h, i, heads, v, num_target_layers=36, block_size=7, mask_token_id=151669, target_layer_ids=list(FIVE)
    )
    config |= {
        "layer_types": ["full_attention"] * 5,
        "architectures": ["Qwen3DSparkModel"],
        "tie_word_embeddings": False,
    }
    return config, body(h, i, heads, 5, 5) | tables(v, h)


@published("deepseek-ai/dspark_qwen3_4b_block7")
def _():
    config, shapes = qwen3_4b()
    config |= {"markov_rank": 256, "markov_head_type": "vanilla"}
    own = "embedding own, lm_head own"
    tensors = typed(shapes | markov(151936, 256, 2560))
    return Published(config, tensors, "DeepSpec (qwen3)", "dspark", True, 7, FIVE, tables=own, heads=MARKOV)


@published("deepseek-ai/dflash_qwen3_4b_block7")
def _():
    config, shapes = qwen3_4b()
    own = "embedding own, lm_head own"
    return Published(
        {**config, "markov_rank": 0}, typed(shapes), "DeepSpec (qwen3)", "dspark", True, 7, FIVE, tables=own
    )


@published("deepseek-ai/dspark_gemma4_12b_block7")
def _():
    h, i, v = 3840, 15360, 262144
    config = sizes(h, i, (16, 8, 256), v, architectures=["Gemma4DSparkModel"], block_size=7, mask_token_id=4)
    del config["hidden_act"]
    config |= {
        "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "target_layer_ids": [5, 17, 29, 41, 46],
        "num_target_layers": 48, "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0, "markov_rank": 256, "markov_head_type": "vanilla", "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }  # fmt: skip
    shapes = body(h, i, (16, 1, 512), 5, 5) | tables(v, h) | markov(v, 256, h)
    for k in range(5):
        del shapes[f"layers.{k}.self_attn.v_proj.weight"]
        for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            shapes[f"layers.{k}.{norm}.weight"] = (h,)
        shapes[f"layers.{k}.layer_scalar"] = (1,)
    return Published(
        config, typed(shapes), "DeepSpec (gemma4)", "dspark", True, 7, (5, 17, 29, 41, 46),
        rope="halves (neox), theta 1e+06, 128 of 512 dimensions, proportional",
        tables="embedding own, lm_head own", heads=(*MARKOV, "soft cap 30"),
    )  # fmt: skip


@published("stanleyphoong/Ornith-1.0-9B-DSpark")
def _():
    h, i, heads, v = 4096, 12288, (16, 4, 256), 248320
    config = sizes(h, i, heads, v, architectures=["Qwen35DSparkModel"], block_size=7, mask_token_id=248077)
    config |= {
        "model_type": "qwen3_5", "enable_qwen35_gated_q_proj": True, "target_layer_ids": [1, 8, 15, 22, 29],
        "num_target_layers": 32, "markov_rank": 256, "markov_head_type": "vanilla",
        "confidence_temperatures": [1.1, 1.0, 0.9, 1.0, 1.2, 1.3, 1.4],
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    }  # fmt: skip
    shapes = body(h, i, heads, 5, 5, gated=True) | tables(v, h) | markov(v, 256, h)
    return Published(
        config, typed(shapes), "DeepSpec (qwen3.5)", "dspark", True, 7, (1, 8, 15, 22, 29),
        rope="halves (neox), theta 1e+07, 64 of 256 dimensions", tables="embedding own, lm_head own", heads=MARKOV,
    )  # fmt: skip


@published("satgeze/Qwen3.6-27B-DSpark")
def _():
    """A deep copy of the target's config: much of it is noise."""
    h, i, heads, v = 5120, 17408, (24, 4, 256), 248320
    config = sizes(h, i, heads, v, architectures=["Qwen3DSparkModel"], block_size=15, mask_token_id=248077)
    config |= {
        "target_layer_ids": [1, 16, 31, 46, 61], "markov_rank": 256, "markov_head_type": "vanilla",
        "num_target_layers": 64, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "num_experts": 0, "sliding_window": None,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]},
    }  # fmt: skip
    shapes = body(h, i, heads, 5, 5) | tables(v, h) | markov(v, 256, h)
    return Published(
        config, typed(shapes), "DeepSpec (qwen3)", "dspark", True, 15, (1, 16, 31, 46, 61),
        rope="halves (neox), theta 1e+07", tables="embedding own, lm_head own", heads=MARKOV,
    )  # fmt: skip


@published("openbmb/MiniCPM5-2B-DSpark")
def _():
    h, i, heads, v = 2048, 6144, (16, 2, 128), 130560
    config = sizes(h, i, heads, v, architectures=["Qwen3DSparkModel"], block_size=7, mask_token_id=130559)
    config |= {"target_layer_ids": list(FIVE), "markov_rank": 256, "markov_head_type": "vanilla", "draft_vocab_size": v}
    shapes = body(h, i, heads, 5, 5) | markov(v, 256, h)
    return Published(config, typed(shapes), "DeepSpec (qwen3)", "dspark", True, 7, FIVE, heads=MARKOV)


@published("a Ling head")
def _():
    config, shapes = qwen3_4b()
    config |= {"architectures": ["LingDSparkModel"], "markov_rank": 256, "markov_head_type": "rnn"}
    shapes |= markov(151936, 256, 2560)
    shapes |= {"markov_head.joint_proj.weight": (768, 3072), "markov_head.joint_proj.bias": (768,)}
    heads = ("Markov rnn of rank 256", MARKOV[1])
    own = "embedding own, lm_head own"
    return Published(config, typed(shapes), "DeepSpec (qwen3)", "dspark", True, 7, FIVE, tables=own, heads=heads)


@published("RadixArk/Qwen3.8-27B-DSpark")
def _():
    h, i, heads, v = 5120, 17408, (32, 8, 128), 248320
    config = sizes(h, i, heads, v, architectures=["DSparkDraftModel"], block_size=7, num_target_layers=64)
    config |= {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000000, "factor": 32.0, "original_max_position_embeddings": 8192,
            "beta_fast": 32.0, "beta_slow": 1.0,
        },
        "dflash_config": {
            "projector_type": "dspark", "attention_mode": "gqa", "mask_token_id": 248077, "markov_rank": 256,
            "target_layer_ids": [1, 16, 31, 46, 61], "confidence_head_alpha": 0.0,
        },
    }  # fmt: skip
    shapes = body(h, i, heads, 5, 5) | {f"logit_head.{k}": s for k, s in markov(v, 256, h).items()}
    return Published(
        config, typed(shapes), "SpecForge DSpark", "dspark", True, 7, (1, 16, 31, 46, 61),
        rope="halves (neox), theta 1e+07, yarn by 32", heads=MARKOV,
    )  # fmt: skip


@published("Nanbeige/Nanbeige4.2-3B-DSpark")
def _():
    """The target runs its 22 layers twice, and taps count the 44 steps."""
    h, i, heads, v = 2560, 10496, (20, 4, 128), 166144
    config = sizes(h, i, heads, v, architectures=["DFlashDraftModel"], block_size=7, num_target_layers=22)
    nested = {
        "projector_type": "dspark",
        "mask_token_id": 166100,
        "target_layer_ids": [1, 11, 21, 31, 41],
        "markov_rank": 256,
    }
    shapes = body(h, i, heads, 5, 5) | markov(v, 256, h, confidence=False)
    return Published(
        {**config, "dflash_config": nested}, typed(shapes), "SpecForge DSpark", "dspark", True, 7, (1, 11, 21, 31, 41),
        heads=MARKOV[:1],
    )  # fmt: skip


@published("LiquidAI/LFM2.5-2.6B-DSpark")
def _():
    h, i, heads, v = 2048, 6144, (32, 8, 64), 128000
    config = sizes(h, i, heads, v, architectures=["Lfm2DSparkDraftModel"], block_size=9, rope_is_neox_style=False)
    config |= {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}
    config["dflash_config"] = {"target_layer_ids": [1, 8, 15, 22, 28], "mask_token_id": 127999, "num_target_layers": 30}
    shapes = body(h, i, heads, 5, 5) | markov(v, 256, h)
    return Published(
        config, typed(shapes), "LiquidAI LFM2.5 DSpark", "dspark", True, 9, (1, 8, 15, 22, 28),
        rope="neighbours (interleaved), theta 1e+06", heads=MARKOV,
    )  # fmt: skip


@published("NVIDIA Nemotron-3.5-Lightning DSpark, NVFP4")
def _():
    h, i, heads, v, taps = 2688, 6144, (32, 2, 128), 131072, (1, 5, 19, 29, 41, 51)
    config = sizes(h, i, heads, v, 6, architectures=["Qwen3DSparkModel"], block_size=8, num_target_layers=52)
    config |= {
        "dflash_query_causal": True, "dspark_bonus_anchor": True, "dspark_fixup_head_type": "markov", "rope_theta": 10000.0,
        "rope_parameters": None, "dspark_markov_rank": 512, "markov_rank": 512, "has_embed_tokens": True,
        "eagle_aux_hidden_state_layer_ids": [t + 1 for t in taps], "mask_token_id": 990, "target_layer_ids": list(taps),
        "dflash_config": {
            "attention_sink_bias": True, "causal": True, "mask_token_id": 990, "use_swa": True, "swa_window_size": 1024,
            "sample_from_anchor": False, "target_layer_ids": list(taps),
        },
    }  # fmt: skip
    shapes = body(h, i, heads, 6, 6) | {"embed_tokens.weight": (v, h)} | markov(v, 512, h, confidence=False)
    packed = [n for n in shapes if ".mlp." in n or n in ("fc.weight", "markov_head.markov_w2.weight")]
    shapes |= {f"layers.{k}.self_attn.attention_sink_bias": (heads[0],) for k in range(6)}
    return Published(
        config, nvfp4(shapes, packed), "Nemotron DSpark", "dspark", False, 7, taps, ("all layers causal, window 1024",),
        "halves (neox), theta 10000", "embedding own, lm_head borrowed", ("Markov vanilla of rank 512", "attention sinks"),
    )  # fmt: skip


@published("NVIDIA Nemotron-3.5 DFlash, NVFP4")
def _():
    h, i, heads, v, taps = 2688, 6144, (32, 2, 128), 131072, (1, 5, 19, 29, 41, 51)
    config = sizes(h, i, heads, v, 6, architectures=["DFlashDraftModel"], block_size=8, num_target_layers=52)
    config["rope_parameters"] = {
        "rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "rope_theta": 10000.0,
    }  # fmt: skip
    config["dflash_config"] = {
        "mask_token_id": 990, "target_layer_ids": list(taps), "causal": False, "attention_sink_bias": False,
        "use_swa": False, "sample_from_anchor": False,
    }  # fmt: skip
    config |= {"dflash_query_causal": False, "dspark_fixup_head_type": None, "dspark_markov_rank": None}
    config |= {"eagle_aux_hidden_state_layer_ids": [t + 1 for t in taps], "layer_types": ["full_attention"] * 6}
    shapes = body(h, i, heads, 6, 6) | {"embed_tokens.weight": (v, h)}
    packed = [n for n in shapes if ".mlp." in n or n == "fc.weight"]
    return Published(
        config, nvfp4(shapes, packed), "z-lab DFlash", "dflash", False, 7, taps,
        rope="halves (neox), theta 10000, yarn by 128", tables="embedding own, lm_head borrowed",
    )  # fmt: skip


@published("z-lab/Qwen3-8B-DFlash-b16")
def _():
    h, i, heads, v = 4096, 12288, (32, 8, 128), 151936
    config = sizes(h, i, heads, v, architectures=["DFlashDraftModel"], block_size=16, num_target_layers=36)
    config |= {"dflash_config": {"mask_token_id": 151669, "target_layer_ids": list(FIVE)}, "tie_word_embeddings": True}
    return Published(config, typed(body(h, i, heads, 5, 5)), "z-lab DFlash", "dflash", False, 15, FIVE)


@published("z-lab DFlash without taps")
def _():
    """The config names none: as many as layers, spread by the published formula."""
    h, i, heads, v = 4096, 14336, (32, 8, 128), 128256
    config = sizes(h, i, heads, v, architectures=["DFlashDraftModel"], block_size=10, num_target_layers=32)
    config |= {
        "mask_token_id": 128002,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }  # fmt: skip
    rope = "halves (neox), theta 1e+06, llama3 by 8"
    return Published(
        config, typed(body(h, i, heads, 5, 5)), "z-lab DFlash", "dflash", False, 9, (1, 8, 15, 22, 29), rope=rope
    )


@published("z-lab DFlash with windows")
def _():
    """Sliding layers are causal unless a key says otherwise; the last is full."""
    h, i, heads, v = 2048, 6144, (32, 4, 128), 248320
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    config = sizes(h, i, heads, v, architectures=["DFlashDraftModel"], num_target_layers=40, layer_types=kinds)
    config |= {"sliding_window": 4096, "use_sliding_window": True}
    config["dflash_config"] = {"block_size": 16, "mask_token_id": 248077, "target_layer_ids": [1, 10, 19, 28, 37]}
    masks = ("layers 0 to 3 causal, window 4096", "layer 4 bidirectional")
    return Published(
        config, typed(body(h, i, heads, 5, 5)), "z-lab DFlash", "dflash", False, 15, (1, 10, 19, 28, 37), masks
    )


@published("meta-models/Muse-Glimmer-30B-assistant")
def _():
    h, i, heads, v = 6656, 19968, (32, 8, 128), 202048
    config = sizes(h, i, heads, v, architectures=["MuseGlimmerAssistantModel"], block_size=16, mask_token_id=201818)
    config |= {
        "target_layer_ids": [1, 13, 25, 37, 49], "is_causal": False, "sliding_window": 2048, "num_target_layers": 52,
        "layer_types": ["sliding_attention"] * 5, "model_type": "muse_glimmer_assistant",
    }  # fmt: skip
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    shapes = {names.get(k, k): s for k, s in body(h, i, heads, 5, 5).items()}
    return Published(
        config, typed(shapes), "Muse-Glimmer assistant (DFlash)", "dflash", False, 15, (1, 13, 25, 37, 49),
        ("all layers bidirectional, window 2048",),
    )  # fmt: skip


SELECTOR = ("selector of rank 256 over 16 candidates", "convolutions over 2 slots")


@published("incoai/Qwen3.8-27B-DFlash2")
def _():
    h, i, heads, v = 5120, 17408, (32, 8, 128), 248320
    config = sizes(h, i, heads, v, architectures=["DFlash2DraftModel"], is_causal=False, num_target_layers=64)
    config |= {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "rope_theta": 10000000}
    config["dflash_config"] = {
        "block_size": 8, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61], "conv_kernel_size": 2,
        "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
    }  # fmt: skip
    shapes = body(h, i, heads, 5, 5) | dflash2(v, 256, h, 5)
    assert len(shapes) == 81
    return Published(
        config, typed(shapes), "DFlash 2", "dflash2", False, 7, (5, 19, 33, 47, 61),
        ("all layers bidirectional, window 2048",), "halves (neox), theta 1e+07", heads=SELECTOR,
    )  # fmt: skip


@published("incoai/Muse-Glimmer-30B-DFlash2")
def _():
    h, i, heads, v = 6656, 19968, (32, 8, 128), 202048
    config = sizes(h, i, heads, v, architectures=["DFlash2BeamDraftModel"], is_causal=False, num_target_layers=52)
    config |= {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "rope_theta": 500000}
    config["dflash_config"] = {
        "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49],
        "output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0,
    }  # fmt: skip
    shapes = body(h, i, heads, 5, 5) | dflash2(v, 256, h, 5)
    return Published(
        config, typed(shapes), "DFlash 2", "dflash2", False, 15, (1, 13, 25, 37, 49),
        ("all layers bidirectional, window 2048",), "halves (neox), theta 500000", heads=(*SELECTOR, "soft cap 20"),
    )  # fmt: skip


def speculators(kind: str, layer: dict[str, Any], tokens: int | None, **keys: Any) -> dict[str, Any]:
    methods = [] if tokens is None else [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {"proposal_methods": methods, "verifier": {"name_or_path": "org/target"}},
        "transformer_layer_config": layer,
        **keys,
    }


@published("RedHatAI/Qwen3.8-27B-speculator.dspark")
def _():
    h, i, heads, v = 5120, 17408, (20, 4, 256), 248320
    layer = sizes(h, i, heads, v, layer_types=["sliding_attention"] * 5, sliding_window=2048, rope_theta=10000000)
    layer["rope_parameters"] = {"rope_theta": 10000000, "rope_type": "default", "mrope_section": [11, 11, 10]}
    aux = [4, 18, 32, 46, 60]
    config = speculators("dspark", layer, 8, block_size=8, aux_hidden_state_layer_ids=aux, mask_token_id=248077)
    config |= {"draft_vocab_size": v, "markov_rank": 256, "markov_head_type": "vanilla"}
    return Published(
        config, typed(body(h, i, heads, 5, 5) | markov(v, 256, h)), "speculators", "dspark", True, 8,
        (3, 17, 31, 45, 59), ("all layers causal, window 2048",), "halves (neox), theta 1e+07", heads=MARKOV,
    )  # fmt: skip


@published("DaoCloud/Muse-Glimmer-30B-DSpark")
def _():
    h, i, heads, v = 6656, 19968, (32, 8, 128), 202048
    layer = sizes(
        h, i, heads, v, layer_types=["sliding_attention"] * 5, sliding_window=2048, final_logit_softcapping=20.0
    )
    aux = [2, 14, 26, 38, 50]
    config = speculators("dspark", layer, 15, block_size=15, aux_hidden_state_layer_ids=aux, mask_token_id=201818)
    config |= {"draft_vocab_size": v, "sample_from_anchor": True, "sliding_window_non_causal": False}
    return Published(
        config, typed(body(h, i, heads, 5, 5) | markov(v, 256, h)), "speculators", "dspark", True, 15,
        (1, 13, 25, 37, 49), ("all layers causal, window 2048",), heads=MARKOV,
    )  # fmt: skip


@published("makora-ai/gemma4-26b-a4b-dspark")
def _():
    """An old file: no sample_from_anchor, a reduced vocabulary, own tables."""
    h, i, heads, v, rows = 2816, 5632, (16, 8, 128), 262144, 32000
    aux = [2, 10, 18, 26]
    config = speculators(
        "dspark", sizes(h, i, heads, v, 4), 6, block_size=7, aux_hidden_state_layer_ids=aux, mask_token_id=4
    )
    config["draft_vocab_size"] = rows
    shapes = body(h, i, heads, 4, 4) | tables(v, h, rows) | markov(v, 256, h, rows=rows)
    shapes |= {"d2t": (rows,), "t2d": (v,), "verifier_norm.weight": (h,), "verifier_lm_head.weight": (rows, h)}
    return Published(
        config, typed(shapes), "speculators", "dspark", False, 6, (1, 9, 17, 25), tables="embedding own, lm_head own",
        heads=MARKOV,
    )  # fmt: skip


@published("a speculators dflash")
def _():
    h, i, heads, v = 4096, 12288, (32, 8, 128), 151936
    config = speculators("dflash", sizes(h, i, heads, v), 15, block_size=16, mask_token_id=151669, draft_vocab_size=v)
    config["aux_hidden_state_layer_ids"] = [2, 10, 18, 26, 34]
    return Published(config, typed(body(h, i, heads, 5, 5)), "speculators", "dflash", False, 15, FIVE)


@published("a speculators dflash2")
def _():
    h, i, heads, v = 4096, 12288, (32, 8, 128), 151936
    layer = sizes(h, i, heads, v, layer_types=["sliding_attention"] * 5, sliding_window=2048)
    config = speculators("dflash2", layer, 15, block_size=16, mask_token_id=151669, draft_vocab_size=v)
    config |= {"aux_hidden_state_layer_ids": [2, 10, 18, 26, 34], "architectures": ["DFlash2DraftModel"]}
    return Published(
        config, typed(body(h, i, heads, 5, 5) | dflash2(v, 256, h, 5)), "speculators", "dflash2", False, 15, FIVE,
        ("all layers bidirectional, window 2048",), heads=SELECTOR,
    )  # fmt: skip
