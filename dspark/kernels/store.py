"""Findings on disk: what was measured on a machine, by its id, the kernels' text and the shape."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs

from dspark.cache import cache_dir
from dspark.kernels.measure import Finding
from dspark.kernels.text import shortened
from dspark.platform import machine

TEXTS = ("qmm.cu", "qmm.metal", "gated.cu", "attention.cu", "stack.cu", "stack_target.cu", "stack_draft.cu")


def path() -> Path:
    """The file in the user's cache."""
    return cache_dir() / "kernels.json"


def here() -> str:
    """What findings hold for: this machine with this MLX, and these kernels."""
    text = "".join(shortened(name) for name in TEXTS)
    return f"{machine().id}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def read(file: Path | None = None) -> dict[str, Finding]:
    """The findings of this machine, by the shape in words. A file that cannot be read holds none."""
    return {name: cattrs.structure(entry, Finding) for name, entry in _load(file or path()).get(here(), {}).items()}


def write(found: Mapping[str, Finding], file: Path | None = None) -> None:
    """Add findings of this machine. Raises OSError where the file cannot be written."""
    file = file or path()
    known = _load(file)
    known[here()] = {**known.get(here(), {}), **{name: attrs.asdict(finding) for name, finding in found.items()}}
    file.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read it meanwhile.
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, suffix=".json") as whole:
        json.dump(known, whole, indent=1, sort_keys=True)
    os.replace(whole.name, file)


def _load(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
