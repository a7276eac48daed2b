"""Tiny models of every family that can be built: random weights, scaled so that greedy text has dozens of different tokens.

`build("qwen3")` gives an mlx-lm model, `build("vlm/qwen3_5")` the language model of an mlx-vlm one. Windows are 8 tokens wide.
"""

import importlib
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

VOCAB = 256
WINDOW = 8

# What every family takes if it has a field of that name.
MENU = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
}
GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
MROPE = {"type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 0.5,
}
LFM = {"conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [1, 3]}
SLIDING = ["sliding_attention", "full_attention"] * 2
MLA = {"num_key_value_heads": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
INDEX = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}
LONGCAT = {
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# By model_type: what the menu does not have. "text" goes into text_config together with the menu.
FAMILIES: dict[str, dict] = {
    "Klear": {"gain": 2.0},
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 3,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "gain": 2.0,
    },
    "afmoe": {"layer_types": SLIDING, "sliding_window": WINDOW, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True, "gain": 2.0},
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {"layer_group_size": 4, "group_norm_size": 1, "num_key_value_heads": 4},
    "bailing_moe": {},
    "bailing_moe_linear": {"layer_group_size": 4, "group_norm_size": 1, "num_key_value_heads": 4},
    "bailing_moe_v3": {"layer_group_size": 4, "head_dim": 32},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 1.0},
    "dbrx": {
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
    },
    "deepseek_v3": MLA,
    "deepseek_v32": {**MLA, **INDEX},
    "deepseek_v41": {},
    "dots1": {"scoring_func": "noaux_tc"},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {"use_bias": False, "moe_num_experts": 4, "moe_k": 2},
    "exaone": {"num_layers": 4},
    "exaone4": {"rope_scaling": None, "sliding_window": WINDOW, "sliding_window_pattern": "LG"},
    "exaone_moe": {"sliding_window": WINDOW, "layer_types": SLIDING, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_expand": 1,
        "mamba_n_heads": 4,
        "lm_head_multiplier": 1.0,
    },
    "gear": {
        "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
        "sliding_window": WINDOW,
    },
    "gemma": {"embed": 0.2},
    "gemma2": {"query_pre_attn_scalar": 16.0, "embed": 0.2},
    "gemma3": {"text": {"model_type": "gemma3_text", "sliding_window": WINDOW, "sliding_window_pattern": 3}},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": WINDOW, "sliding_window_pattern": 3},
    "gemma3n": {
        "text": {
            "model_type": "gemma3n_text",
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "sliding_window": WINDOW,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": SLIDING,
            "activation_sparsity_pattern": [0.0] * 4,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
        },
        "embed": 0.2,
    },
    "gemma4": {
        "text": {
            "model_type": "gemma4_text",
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "sliding_window": WINDOW,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_double_wide_mlp": False,
            "layer_types": SLIDING,
        },
        "embed": 0.2,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "sliding_window": WINDOW,
        "num_key_value_heads": 1,
        "layer_types": [*SLIDING, *SLIDING[:2]],
        "embed": 0.2,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {"rope_scaling": None, "use_qk_norm": True},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "glm_moe_dsa": {**MLA, **INDEX, "rope_parameters": ROPE},
    "gpt2": {"gain": 3.0, "n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512},
    "gpt_bigcode": {"gain": 3.0, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "n_inner": 96},
    "gpt_neox": {"gain": 2.0, "rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": 4},
    "gpt_oss": {"sliding_window": WINDOW, "layer_types": SLIDING},
    "gptj": {"gain": 3.0, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "rotary_dim": 8},
    "granite": GRANITE,
    "granitemoe": GRANITE,
    "granitemoehybrid": {
        **GRANITE,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
    },
    "helium": {},
    "hunyuan": {
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text": {**MLA, "model_type": "kimi_k2"}},
    "kimi_k3": {
        "text": {
            "model_type": "kimi_linear",
            "num_key_value_heads": 4,
            "num_experts_per_token": 2,
            "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0,
            "attn_res_block_size": 2,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 2,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
        }
    },
    "kimi_linear": {
        "linear_attn_config": {"kda_layers": [1, 2, 3], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4},
        "model_max_length": 512,
        "num_experts_per_token": 2,
        "num_key_value_heads": 4,
    },
    "kimi_vl": {"text": {**MLA, "model_type": "deepseek_v3"}},
    "laguna": {"sliding_window": WINDOW, "layer_types": SLIDING},
    "lfm2": {
        **LFM,
        "block_dim": 64,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 96,
    },
    "lfm2-vl": {
        "text": {
            **LFM,
            "model_type": "lfm2",
            "block_dim": 64,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 96,
        }
    },
    "lfm2_moe": {**LFM, "use_expert_bias": True, "num_dense_layers": 1},
    "lille-130m": {"block_size": 512, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 4},
    "llama": {"tie_word_embeddings": True},
    "llama4": {
        "text": {
            "model_type": "llama4_text",
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": True},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": {**LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 8},
    "mamba2": {
        "num_heads": 8,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": "auto",
    },
    "mellum": {
        "sliding_window": WINDOW,
        "layer_types": SLIDING,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    "mimo": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minicpm": {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0},
    "minicpm3": {
        "dim_model_base": 64,
        "scale_depth": 1.4,
        "scale_emb": 1.0,
        "num_key_value_heads": 4,
        "rope_scaling": {
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "type": "longrope",
        },
    },
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": {
        "text": {
            "dense_intermediate_size": 96,
            "sparse_attention_config": {
                "sparse_num_index_heads": 1,
                "sparse_index_dim": 16,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 2,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 0, 1],
            },
            "moe_layer_freq": [0, 1, 1, 1],
        }
    },
    "ministral3": {
        "sliding_window": WINDOW,
        "layer_types": SLIDING,
        "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8},
    },
    "mistral3": {
        "text": {
            "model_type": "ministral3",
            "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8},
        }
    },
    "mistral4": {
        **MLA,
        "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8},
    },
    "mixtral": {},
    "muse_glimmer": {"sliding_window": WINDOW, "output_multiplier": 1.0},
    "nanbeige": {"gain": 2.0, "num_hidden_layers": 3, "num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "nemotron_h": {
        "num_hidden_layers": 6,
        "hybrid_override_pattern": list("M*-ME*"),
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "olmo2": {"gain": 2.0},
    "olmo3": {"sliding_window": WINDOW, "layer_types": SLIDING},
    "olmo_hybrid": {**GATED_DELTA, "linear_allow_neg_eigval": True},
    "olmoe": {},
    "openelm": {
        "num_transformer_layers": 3,
        "model_dim": 64,
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 4],
        "num_kv_heads": [2, 2, 2],
        "ffn_multipliers": [1.5, 1.5, 1.5],
        "share_input_output_layers": False,
    },
    "phi": {"gain": 2.0, "num_key_value_heads": 4},
    "phi3": {"partial_rotary_factor": 1.0},
    "phimoe": {
        "rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "long_mscale": 1.0, "short_mscale": 1.0},
    },
    "phixtral": {"gain": 2.0, "num_vocab": VOCAB, "model_dim": 64, "num_heads": 4, "num_layers": 3, "rotary_dim": 8},
    "pixtral": {"text": {"model_type": "mistral"}},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 16,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
    },
    "plamo3": {"gain": 2.0, "window_size": WINDOW, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {},
    "qwen": {"kv_channels": 16, "num_attention_heads": 4, "intermediate_size": 192},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen2_vl": {"text": {"model_type": "qwen2", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}},
    "qwen3": {"gain": 1.5, "tie_word_embeddings": True},
    "qwen3_5": {"text": {**GATED_DELTA, "rope_parameters": MROPE, "tie_word_embeddings": True, "num_experts": 0}},
    "qwen3_5_moe": {"text": {**GATED_DELTA, "rope_parameters": MROPE}},
    "qwen3_moe": {},
    "qwen3_next": GATED_DELTA,
    "qwen3_vl": {"text": {"model_type": "qwen3"}},
    "qwen3_vl_moe": {"text": {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "embeddings_scale_by_sqrt_dim": True,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "rwkv7": {
        "head_dim": 32,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "spark2_5": {"sliding_window": WINDOW, "layer_types": SLIDING, "rope_parameters": dict.fromkeys(SLIDING, ROPE)},
    "stablelm": {"use_qkv_bias": False},
    "starcoder2": {"gain": 3.0},
    "step3p5": {
        "num_attention_groups": 2,
        "sliding_window": WINDOW,
        "layer_types": SLIDING,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3",
    },
    "talkie": {"gain": 2.0},
    "telechat3": {},
    "youtu_llm": {"num_key_value_heads": 4},
    "vlm/gemma4": {},
    "vlm/lfm2": {},
    "vlm/muse_glimmer": {},
    "vlm/nemotron_h": {},
    "vlm/qwen3_5": {},
}

# Families of mlx-lm without a tiny model here, and why.
NOT_BUILT = {
    "bitnet": "its linear layers are Metal kernels, which no CPU runs",
    "muse_spark": "its rotary embedding is a Metal kernel, which no CPU runs",
    "olmo": "it needs the package ai2-olmo",
    "phi3small": "its block-sparse attention corrupts memory on a CPU",
}


def build(name, *, seed=0, dtype=mx.float32, **changes):
    """A tiny model of a family. `changes`: config fields to set otherwise."""
    extras = dict(FAMILIES[name.removeprefix("vlm/") if name != "vlm/gemma4" else "gemma4_text"])
    scales = extras.pop("gain", 1.0), extras.pop("embed", 1.0)
    if name.startswith("vlm/"):
        model = _vlm(name.removeprefix("vlm/"), {**extras, **changes})
    elif name == "prism_hadamard_qwen35":
        return _pack(_randomized(_model(name, _pack_config()), seed, scales, dtype))
    else:
        model = _model(name, _config(name, extras, changes))
    return _randomized(model, seed, scales, dtype)


def _config(name, extras, changes):
    text = extras.pop("text", None)
    if text is None:
        return {**MENU, "model_type": name, **extras, **changes}
    return {"model_type": name, "vocab_size": VOCAB, "text_config": {**MENU, **text, **changes}, **extras}


def _model(name, config):
    module = importlib.import_module(f"mlx_lm.models.{name}")
    return module.Model(module.ModelArgs.from_dict(config))


def _vlm(name, extras):
    language = importlib.import_module(f"mlx_vlm.models.{name}.language")
    config = importlib.import_module(f"mlx_vlm.models.{name}.config")
    if name in ("gemma4", "muse_glimmer", "qwen3_5"):
        fields = config.TextConfig.__dataclass_fields__
        values = {**MENU, "model_type": f"{name}_text", **extras.get("text", {}), **extras}
        args = config.TextConfig(**{k: v for k, v in values.items() if k in fields})
    else:
        args = config.ModelConfig.from_dict({**MENU, "model_type": name, **extras})
    if name != "qwen3_5":
        return language.LanguageModel(args)
    ids = {f"{kind}_token_id": -1 for kind in ("image", "video", "vision_start")}
    vision = SimpleNamespace(spatial_merge_size=2)
    whole = SimpleNamespace(vision_config=vision, text_config=args, model_type="qwen3_5", **ids)
    return language.LanguageModel(args, whole)


def _randomized(model, seed, scales, dtype):
    """Normal weights of 1.4 / sqrt(inputs), so that every layer matters. `scales`: of the layers, up where the text would
    turn in circles, and of the embedding, down where a tied head would repeat its input."""
    mx.random.seed(seed)
    gain, embed = scales

    def draw(path, p):
        if not isinstance(p, mx.array) or not mx.issubdtype(p.dtype, mx.floating):
            return p
        leaf = path.split(".")[-1]
        if leaf in ("A_log", "D", "signs", "scales", "biases"):
            return p
        if p.ndim < 2:
            return (p + 0.1 * mx.random.normal(p.shape)).astype(dtype)
        fan = p.shape[-1] * (p.shape[-2] if p.ndim == 3 and "conv" in path else 1)
        if any(word in path for word in ("embed", "wte")):
            scale = embed
        else:
            scale = 1.0 if any(word in path for word in ("head", "conv", "norm", "router")) else gain
        return (mx.random.normal(p.shape) * (1.4 * scale * fan**-0.5)).astype(dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def _pack_config():
    """A packed Hadamard model over qwen3_5; every width is a multiple of 128."""
    text = {
        **MENU,
        **GATED_DELTA,
        "num_experts": 0,
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_value_head_dim": 32,
        "rope_parameters": MROPE,
    }
    names = []
    for i in range(4):
        mixer = (
            ("linear_attn.in_proj_qkv", "linear_attn.out_proj") if i < 3 else ("self_attn.q_proj", "self_attn.o_proj")
        )
        names += [f"model.layers.{i}.{part}" for part in (*mixer, "mlp.gate_proj", "mlp.down_proj")]
    modules = [{"path": n, "block": 0, "embedding": False, "dtype": "float16"} for n in names]
    modules.append({"path": "model.embed_tokens", "block": 0, "embedding": True, "dtype": "float16"})
    return {
        "model_type": "prism_hadamard_qwen35",
        "text_config": text,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "gdn_activation_layout": "grouped",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": modules,
    }


def _pack(model):
    """Fill the packed modules with plausible 2-bit content."""
    for _, module in model.named_modules():
        if type(module).__name__.startswith("HadamardQuantized"):
            rows, columns = module.weight.shape[0], module.weight.shape[1] * 16
            weight = (mx.random.normal((rows, columns)) * (1.4 * columns**-0.5)).astype(mx.float16)
            module.weight, module.scales, module.biases = mx.quantize(weight, group_size=128, bits=2)
    mx.eval(model.parameters())
    return model


def quantized(model, bits=4, group_size=32):
    """The same model with quantised linears and embedding, where the group fits."""
    fits = lambda path, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % group_size == 0
    nn.quantize(model, group_size=group_size, bits=bits, class_predicate=fits)
    return model
