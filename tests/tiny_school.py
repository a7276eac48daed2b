"""A tiny target that can teach, with a tokenizer of one character a token, and a training recipe for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dspark.models.target import Target
from dspark.train.command import Teacher
from tests.families import build

STOP, USER, END, BOT, MASK = range(5)
SIGNS = "\x00\x01\x02\x03\x04 abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?.,:;+="
VOCAB, WIDTH = 64, 32

RECIPE = """
schema = 1
[target]
source = "./target"
[drafter]
kind = "{kind}"
layers = 1
block = {block}
intermediate = 32
markov_rank = 32
selector_rank = 8
selector_top_k = 4
mask_token_id = 4
[data]
folder = "data"
questions = 96
openings = 0.25
question_tokens = 24
answer_tokens = 32
rows = 32
held_out = 8
lengths = [64]
[optimiser]
steps = {steps}
rate = 4e-3
rows = 4
anchors = 8
evaluations = 1
[output]
folder = "{output}"
"""


class CharTokenizer:
    """The parts of mlx-lm's tokenizer wrapper that training uses."""

    has_chat_template, chat_template = True, "signs around the words"
    eos_token_id, eos_token_ids, bos_token = STOP, {STOP}, None

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, tokenize: bool = True) -> Any:
        text = f"{SIGNS[USER]}{messages[0]['content']}{SIGNS[END]}{SIGNS[BOT]}"
        return self.encode(text) if tokenize else text

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [SIGNS.find(c) if c in SIGNS else SIGNS.index("?") for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(SIGNS[i] if i < len(SIGNS) else "." for i in ids)


def tiny_teacher(cycle: int = 59) -> Teacher:
    """A llama of two layers whose weights are random but for the vocabulary: each sign is followed by the next one of its
    cycle, most of the time, so that its text can be guessed. Short cycles make it loop."""
    model = build(
        "llama",
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    for layer in model.layers:
        layer.self_attn.o_proj.weight *= 0.1
        layer.mlp.down_proj.weight *= 0.1
    rng = np.random.default_rng(0)
    table = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    table *= WIDTH**0.5 / np.linalg.norm(table, axis=1, keepdims=True)
    table[:, 0] = 2.0
    follower = np.arange(VOCAB)
    for at in range(5, VOCAB, cycle):
        part = np.arange(at, min(at + cycle, VOCAB))
        follower[part] = np.roll(part, -1)
    project = np.zeros_like(table)
    project[follower[5:]] = 0.25 * table[5:]
    project[10] += 0.25 * table[USER]
    project[30] += 0.25 * table[BOT]
    project[40] += 0.25 * table[END]
    project[:, 0] = 0.0
    # All rows share a component, which is what ends a turn now and then.
    project[[STOP, END], 0] = 1.2, 1.9
    model.model.embed_tokens.weight, model.lm_head.weight = mx.array(table), mx.array(project)
    mx.eval(model.parameters())
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return Teacher(Target(model, config, "tiny"), CharTokenizer())


def write_recipe(folder: Path, **changes: Any) -> Path:
    """A recipe file for `tiny_teacher`; `changes`: kind, block, steps, output."""
    said = {"kind": "dspark", "block": 4, "steps": 150, "output": "out", **changes}
    file = folder / f"{said['output']}.toml"
    file.write_text(RECIPE.format(**said))
    return file
