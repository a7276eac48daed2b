"""Build mlx-lm's tokenizer from what a GGUF file carries: tokens, merges, special tokens and the chat template.

GGUF names the splitting rule only (`tokenizer.ggml.pre`); the rules themselves are those of the models' own
tokenizer.json files. A rule that is not known here is refused: a near one would give other tokens without a word.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from dspark.checkpoints.gguf_header import GgufHeader
from dspark.errors import CheckpointError, did_you_mean

CONTROL, USER_DEFINED = 3, 4
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"

QWEN2 = CONTRACTIONS + WORDS + r"\p{N}|" + PUNCTUATION_AND_SPACE
LLAMA3 = CONTRACTIONS + WORDS + r"\p{N}{1,3}|" + PUNCTUATION_AND_SPACE
TEKKEN = (
    rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Rules with a regular expression of their own; those in GPT2 use the byte-level one of tokenizers.
SPLITS = {"qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "llama3": LLAMA3, "llama-v3": LLAMA3, "llama-bpe": LLAMA3}
SPLITS |= {"tekken": TEKKEN}
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
GPT2 = ("gpt-2", "gpt2", "olmo", *DIGITS_APART)
# Words that are a token as they stand are not split by merges; such files also begin each text with BOS unless told.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")
# Control tokens that end a turn or a document, whatever a file names as its one end token.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
PREFIX = "tokenizer.ggml."


def build_tokenizer(header: GgufHeader) -> TokenizerWrapper:
    """mlx-lm's tokenizer, with its streaming detokenizer, tool parser and thinking marks, from the file's metadata.

    Raises `CheckpointError` for vocabularies that are not byte-level BPE and for splitting rules that are not known.
    Costs under a second and a temporary file of a few MB, for mlx-lm's own loader reads a folder.
    """
    tokens = _tokens(header)
    document = _document(header, tokens)
    settings = _settings(header, tokens)
    try:
        with tempfile.TemporaryDirectory(prefix="dspark-tokenizer-") as folder:
            (Path(folder) / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
            return load_tokenizer(Path(folder), {"trust_remote_code": False}, eos_token_ids=end_ids(header))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{header.path}: its tokenizer cannot be built: {error}") from error


def end_ids(header: GgufHeader) -> list[int]:
    """The ids that end generation: the file's end tokens, and control tokens known to end a turn."""
    tokens, kinds = _tokens(header), _kinds(header)
    ids = {i for name in ("eos_token_id", "eot_token_id") if (i := _token_id(header, name, tokens)) is not None}
    ids |= {i for i, token in enumerate(tokens) if kinds[i] == CONTROL and token in ENDS}
    return sorted(ids)


def _tokens(header: GgufHeader) -> list[str]:
    model = header.metadata.get(f"{PREFIX}model")
    if model != "gpt2":
        raise CheckpointError(
            f"{header.path}: its tokenizer is {model!r}; gpt2 (byte-level BPE) can be read; use the model's "
            "safetensors repository instead"
        )
    tokens = header.metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{header.path}: it carries no {PREFIX}tokens, so it has no vocabulary")
    return tokens


def _kinds(header: GgufHeader) -> list[int]:
    tokens, kinds = header.metadata[f"{PREFIX}tokens"], header.metadata.get(f"{PREFIX}token_type")
    if kinds is None:
        return [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{header.path}: {PREFIX}token_type has {len(kinds)} entries for {len(tokens)} tokens")
    return [int(kind) for kind in kinds]


def _rule(header: GgufHeader) -> str:
    rule = header.metadata.get(f"{PREFIX}pre")
    allowed = sorted({*SPLITS, *GPT2})
    if rule not in allowed:
        raise CheckpointError(
            f"{header.path}: {PREFIX}pre is {rule!r}; allowed {', '.join(allowed)}{did_you_mean(rule, allowed)}; "
            "use the model's safetensors repository instead"
        )
    return rule


def _document(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    rule = _rule(header)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{header.path}: {len(tokens) - len(vocab)} of its tokens stand in the vocabulary twice")
    added = [
        {"id": i, "content": tokens[i], "special": kind == CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, kind in enumerate(_kinds(header))
        if kind in (CONTROL, USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": rule in GPT2}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_splitters(rule), byte_level]},
        "post_processor": _post_processor(header, tokens, byte_level),
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": rule in WHOLE_WORDS, "vocab": vocab, "merges": _merges(header, vocab),
        },
    }  # fmt: skip


def _splitters(rule: str) -> list[dict[str, Any]]:
    if rule in SPLITS:
        return [{"type": "Split", "pattern": {"Regex": SPLITS[rule]}, "behavior": "Isolated", "invert": False}]
    return [{"type": "Digits", "individual_digits": True}] if rule in DIGITS_APART else []


def _post_processor(header: GgufHeader, tokens: list[str], byte_level: dict[str, Any]) -> dict[str, Any]:
    if not header.metadata.get(f"{PREFIX}add_bos_token", _rule(header) in WHOLE_WORDS):
        return byte_level
    bos = _token_id(header, "bos_token_id", tokens)
    if bos is None:
        raise CheckpointError(f"{header.path}: {PREFIX}add_bos_token is set, but {PREFIX}bos_token_id is not")
    mark = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [mark, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }


def _merges(header: GgufHeader, vocab: dict[str, int]) -> list[list[str]]:
    merges = header.metadata.get(f"{PREFIX}merges")
    if not isinstance(merges, list):
        raise CheckpointError(f"{header.path}: it carries no {PREFIX}merges, so its text cannot be split into tokens")
    pairs = [merge.split(" ") for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or pair[0] not in vocab or pair[1] not in vocab or "".join(pair) not in vocab:
            raise CheckpointError(f"{header.path}: {PREFIX}merges holds {merge!r}, which joins no two of its tokens")
    return pairs


def _token_id(header: GgufHeader, name: str, tokens: list[str]) -> int | None:
    value = header.metadata.get(f"{PREFIX}{name}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise CheckpointError(f"{header.path}: {PREFIX}{name} is {value!r}, but there are {len(tokens)} tokens")
    return value


def _settings(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
    names["pad_token"] = "padding_token_id"
    settings: dict[str, Any] = {
        key: tokens[i] for key, name in names.items() if (i := _token_id(header, name, tokens)) is not None
    }
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template.strip():
        settings["chat_template"] = template
    context = header.metadata.get(f"{header.metadata.get('general.architecture')}.context_length")
    if isinstance(context, int):
        settings["model_max_length"] = context
    return settings
