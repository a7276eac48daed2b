"""Runs one other program for `dspark bench`, in that program's own Python. Needs nothing but it and the standard library.

Reads JSON lines on standard input, writes one for each on what was standard output; whatever the program itself prints
goes to standard error. The first line says what to load, every further one is a prompt:

    {"peer": "mlx-vlm", "target": FOLDER, "drafter": FOLDER or null, "mode": "dspark", "bits": 4, "blas": [FILES], ...}
    {"ids": [1, 2, 3], "max_tokens": 64}

An answer is an object; one with "error" holds a sentence.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]
Tell = Callable[[int], None]


class CannotLoad(Exception):
    """Says what of the weights the program refused."""


def main() -> int:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if peer is None:
                peer = load(asked)
                said = peer.facts()
            else:
                said = timed(peer, asked["ids"], asked["max_tokens"])
        except (Exception, SystemExit) as error:
            said = {"error": sentence(error)[:500]}
        out.write(json.dumps(said) + "\n")
        out.flush()
        if "error" in said and peer is None:
            return 1
    return 0


def sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, CannotLoad) else f"{type(error).__name__}: {text}"


def loaded(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise CannotLoad(f"cannot load the {what}: {sentence(error)}") from error


def load(asked: Answer) -> Any:
    """Open the BLAS, then import and load the program."""
    for file in asked["blas"]:
        # In front of the one that mlx is linked with, so before anything imports it.
        ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)
    return PEERS[asked["peer"]](asked)


def timed(peer: Any, ids: list[int], max_tokens: int) -> Answer:
    mx = importlib.import_module("mlx.core")
    deliveries: list[tuple[float, int]] = []
    mx.reset_peak_memory()
    began = time.perf_counter()

    def tell(count: int) -> None:
        if count > 0:
            deliveries.append((time.perf_counter() - began, count))

    said = peer.answer(ids, max_tokens, tell)
    took_s = time.perf_counter() - began
    missing = len(said["tokens"]) - sum(count for _, count in deliveries)
    if missing > 0:
        # Tokens that no round told of came with the end of prefill.
        soonest = deliveries[0][0] if deliveries else took_s
        deliveries.insert(0, (min(said.get("first_s") or soonest, soonest), missing))
    return {**said, "deliveries": deliveries, "took_s": took_s, "peak_bytes": mx.get_peak_memory()}


def facts(name: str, model: Any) -> Answer:
    """Version and number formats, to be held against those of the other arms."""
    utils, metadata = importlib.import_module("mlx.utils"), importlib.import_module("importlib.metadata")
    arrays = [array for _, array in utils.tree_flatten(model.parameters())]
    kinds = {str(array.dtype).removeprefix("mlx.core."): 0 for array in arrays}
    for array in arrays:
        kinds[str(array.dtype).removeprefix("mlx.core.")] += array.nbytes
    return {"version": metadata.version(name), "mlx": metadata.version("mlx"), "nbytes_by_dtype": kinds}


class MlxVlm:
    """mlx-vlm's stream_generate. It has no lookup, so without a drafter it decodes plainly."""

    def __init__(self, asked: Answer):
        vlm = importlib.import_module("mlx_vlm")
        self.kv = (
            {} if asked["kv_bits"] is None else {"kv_bits": asked["kv_bits"], "kv_group_size": asked["kv_group_size"]}
        )
        self.model, self.processor = loaded("target", lambda: vlm.load(asked["target"]))
        self.generate, self.draft = vlm.stream_generate, {}
        if asked["drafter"]:
            drafters = importlib.import_module("mlx_vlm.speculative.drafters")
            drafter, kind = loaded("drafter", lambda: drafters.load_drafter(asked["drafter"]))
            loaded("drafter", lambda: drafters.validate_drafter_compatibility(self.model, drafter, kind))
            self.draft = {"draft_model": drafter, "draft_kind": kind}

    def facts(self) -> Answer:
        return facts("mlx-vlm", self.model)

    def answer(self, ids: list[int], max_tokens: int, tell: Tell) -> Answer:
        mx = importlib.import_module("mlx.core")
        last, count = None, 0
        how = {"max_tokens": max_tokens, "temperature": 0.0, **self.draft, **self.kv}
        for last in self.generate(self.model, self.processor, "", input_ids=mx.array([ids]), **how):
            # The closing response repeats the last token where the limit ended the answer.
            tell(last.generation_tokens - count)
            count = last.generation_tokens
        drafter = self.draft.get("draft_model")
        accepted = list(getattr(drafter, "accept_lens", None) or [])
        return {"tokens": list(last.token_ids) if last else [], "rounds": len(accepted) + 1 if drafter else count}


class MlxDspark:
    """mlx-dspark's engine as its server loads it, with the caps and kernels that it measures for itself, no prefix cache."""

    def __init__(self, asked: Answer):
        engine = importlib.import_module("mlx_dspark").Engine
        bits = asked["bits"]
        how = {} if bits is None else {"drafter_bits": bits}
        how |= {
            "mode": asked["mode"],
            "model": asked["target"],
            "drafter": asked["drafter"],
            "kv_bits": asked["kv_bits"],
        }
        self.engine = loaded("weights", lambda: engine.load(**how, prefix_cache=False, memory_guard=False))

    def facts(self) -> Answer:
        return facts("mlx-dspark", self.engine.target.model)

    def answer(self, ids: list[int], max_tokens: int, tell: Tell) -> Answer:
        log = self.engine.rounds
        honest, rounds = log.record, [0]

        def record(event: Answer) -> None:
            honest(event)
            rounds[0] += 1
            tell(int(event.get("committed", 0)))

        log.record, began, texts = record, time.perf_counter(), []
        heard = lambda text: texts.append(time.perf_counter() - began)
        try:
            result = self.engine.generate(
                ids, max_tokens=max_tokens, temperature=0.0, stop=None, seed=None, on_text=heard
            )
        finally:
            log.record = honest
        return {
            "tokens": list(result.token_ids),
            "rounds": result.target_forwards or rounds[0],
            "first_s": result.prefill_seconds or (texts[0] if texts else None),
        }


PEERS: dict[str, Callable[[Answer], Any]] = {"mlx-vlm": MlxVlm, "mlx-dspark": MlxDspark}

if __name__ == "__main__":
    sys.exit(main())
