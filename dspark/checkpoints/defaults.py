"""What a checkpoint itself asks for when it is sampled: `generation_config.json`, or the same keys of a GGUF file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dspark.checkpoints.gguf_header import GgufHeader

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GGUF_KEYS = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def generation_defaults(folder: Path, end_ids: Iterable[int]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Sampling defaults and end ids of a folder, and notes on values that were passed over.

    Keys: those of SAMPLING that are given, and `eos_token_ids`. `do_sample: false` means greedy, as transformers reads
    it; values given without it count.
    """
    file = folder / "generation_config.json"
    given: Any = {}
    notes: list[str] = []
    if file.is_file():
        try:
            given = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            notes.append(f"generation_config.json is passed over: it cannot be read ({error})")
        if not isinstance(given, dict):
            given = {}
    defaults = _sampling(given, notes)
    if given.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    return defaults | {"eos_token_ids": tuple(sorted(end_ids))}, tuple(notes)


def gguf_defaults(header: GgufHeader, end_ids: Iterable[int]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The same of a GGUF file, whose keys begin with `general.sampling.`."""
    keys = {name: f"general.sampling.{GGUF_KEYS.get(name, name)}" for name in SAMPLING}
    given = {name: header.metadata[key] for name, key in keys.items() if key in header.metadata}
    notes: list[str] = []
    return _sampling(given, notes) | {"eos_token_ids": tuple(sorted(end_ids))}, tuple(notes)


def _sampling(given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in SAMPLING:
        value = given.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        if not number or (name in ("top_p", "min_p") and value > 1):
            notes.append(f"the checkpoint's {name} is passed over: {value!r} is no usable value")
            continue
        found[name] = int(value) if name == "top_k" else float(value)
    return found
