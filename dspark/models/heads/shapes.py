"""The parameters that a `HeadConfig` has, by published name: known before anything is allocated."""

from __future__ import annotations

from dspark.models.heads.config import HeadConfig
from dspark.models.heads.parts import LogSnrEmbed

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(c: HeadConfig) -> Shapes:
    """Name -> shape of every parameter of `Head(c)`."""
    hidden, rank = c.hidden_size, c.markov_rank
    shapes: Shapes = {
        "fc.weight": (hidden, len(c.target_layer_ids) * c.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if c.embedding == "own":
        shapes["embed_tokens.weight"] = (c.vocab_size, hidden)
    if c.lm_head == "own":
        shapes["lm_head.weight"] = (c.head_vocab_size, hidden)
    for i in range(len(c.layers)):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(c).items()}
    if c.markov != "none":
        shapes |= {
            "markov_head.markov_w1.weight": (c.vocab_size, rank),
            "markov_head.markov_w2.weight": (c.head_vocab_size, rank),
        }
    if c.markov == "gated":
        shapes |= _linear("markov_head.gate_proj", rank, hidden + rank)
    if c.markov == "rnn":
        shapes |= _linear("markov_head.joint_proj", 3 * rank, hidden + 2 * rank)
    if c.confidence != "none":
        shapes |= _linear("confidence_head.proj", 1, hidden + (rank if c.confidence == "markov" else 0))
    if c.selector_rank:
        for side in ("predecessor", "successor"):
            shapes[f"candidate_selector.{side}_codebook"] = (c.vocab_size, c.selector_rank)
        shapes["candidate_selector.hidden_projection.weight"] = (c.selector_rank, hidden)
    if c.log_snr is not None:
        shapes |= _linear("log_snr_embed.fc1", c.log_snr_width, 2 * LogSnrEmbed.PAIRS)
        shapes |= _linear("log_snr_embed.fc2", hidden, c.log_snr_width)
    return shapes


def _linear(name: str, out: int, into: int) -> Shapes:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _layer(c: HeadConfig) -> Shapes:
    hidden, query, keys = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query * (2 if c.gated_query else 1), hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (c.head_dim,),
        "self_attn.k_norm.weight": (c.head_dim,),
        "mlp.gate_proj.weight": (c.intermediate_size, hidden),
        "mlp.up_proj.weight": (c.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, c.intermediate_size),
    }
    if not c.keys_are_values:
        shapes["self_attn.v_proj.weight"] = (keys, hidden)
    if c.qkv_bias:
        widths = {"q": query * (2 if c.gated_query else 1), "k": keys} | ({} if c.keys_are_values else {"v": keys})
        shapes |= {f"self_attn.{name}_proj.bias": (width,) for name, width in widths.items()}
    if c.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if c.sinks:
        shapes["self_attn.attention_sink_bias"] = (c.num_heads,)
    if c.sandwich:
        shapes |= {
            "pre_feedforward_layernorm.weight": (hidden,),
            "post_feedforward_layernorm.weight": (hidden,),
            "layer_scalar": (1,),
        }
    if c.conv_kernel:
        groups = hidden // c.conv_group
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"{conv}.base_kernel"] = (2, c.conv_kernel, hidden)
            shapes[f"{conv}.kernel_projection.weight"] = (2 * c.conv_kernel * groups, hidden)
    return shapes
