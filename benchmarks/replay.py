"""What a drafter accepts along texts that its target wrote: one target forward a text, every block of it at once.

A text is `{"prompt": [ids], "answer": [ids]}`; EVAL.json holds a list of them. Rounds are walked along the answer as greedy
decoding would: a draft stands while it equals the answer, and a round commits the drafts that stand and one token more.
The target's own forward gives the taps, so nothing depends on whether it would still choose the same answer.

Run: python -m benchmarks.replay DRAFTER EVAL.json [--bits 4] [--limit N] [--recipe smollm2-135m]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dspark.blas import open_blas

FIRST_TOKENS, SMALL_CAP = 100, 4
NO_LOOPS = "full block, answers without loops"


class Text(NamedTuple):
    """Token ids."""

    prompt: list[int]
    answer: list[int]


class Tally:
    """Tokens and rounds of one way to count.

    first: where rounds begin. 0 is behind the prompt, as dspark's own do; 1 is behind the answer's first token, which other
    programs take from the prefill, and which heads trained on answers alone hardly ever guess.
    """

    def __init__(self, cap: int, most: int | None = None, first: int = 0):
        self.cap, self.most, self.first, self.tokens, self.rounds = cap, most, first, 0, 0

    def walk(self, standing: Sequence[int], length: int) -> None:
        """Add a text: standing[i] drafts stand in a block whose anchor is the token before answer[i]."""
        at, end = self.first, min(length, self.most or length)
        while at < end:
            said = min(standing[at], self.cap, end - at - 1) + 1
            at, self.tokens, self.rounds = at + said, self.tokens + said, self.rounds + 1

    @property
    def accepted_length(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


def standing_drafts(head: Any, target: Any, text: Text) -> list[int]:
    """For each token of the answer, how many drafts of a block anchored before it are what the answer says."""
    import mlx.core as mx

    from dspark.models.heads import draft_rows, packed_hidden

    ids = text.prompt + text.answer
    _, taps = target(mx.array([ids[:-1]]), target.make_caches(), head.config.target_layer_ids)
    anchors = mx.arange(len(text.prompt) - 1, len(ids) - 1)
    tokens = mx.array(ids)[anchors]
    hidden = packed_hidden(head, taps, anchors[None], tokens[None])[0]
    drafts = draft_rows(head, head.predicting(hidden, head.config.num_drafts), tokens[:, None]).tokens
    # Behind the answer stands what no draft can be.
    said = mx.concatenate([mx.array(ids), mx.full((drafts.shape[1],), -1)])
    right = drafts == said[anchors[:, None] + 1 + mx.arange(drafts.shape[1])]
    return mx.sum(mx.cumprod(right.astype(mx.int32), axis=1), axis=1).tolist()


def replay(
    head: Any, target: Any, texts: Sequence[Text], progress: Callable[[str], Any] = lambda line: None
) -> dict[str, Tally]:
    """Tallies of the full block, of a small cap, of each answer's first tokens, and of the answers that do not end in a loop.
    `progress` is told after each text."""
    from dspark.train.clean import loop_start

    full = head.config.num_drafts
    ways = {
        f"full block ({full} drafts)": (full, None),
        f"cap {SMALL_CAP}": (SMALL_CAP, None),
        f"first {FIRST_TOKENS} tokens": (full, FIRST_TOKENS),
        NO_LOOPS: (full, None),
    }
    behind = (("", 0), (", behind the first token", 1))
    tallies = {name + where: Tally(*way, first) for where, first in behind for name, way in ways.items()}
    for done, text in enumerate(texts, 1):
        standing = standing_drafts(head, target, text)
        loops = loop_start(text.answer) is not None
        for name, tally in tallies.items():
            if not (loops and name.startswith(NO_LOOPS)):
                tally.walk(standing, len(text.answer))
        so_far = ", ".join(f"{tally.accepted_length:.3f}" for tally in tallies.values())
        progress(f"{done} of {len(texts)} texts: {so_far}")
    return tallies


def read_texts(path: Path, limit: int | None, most: int | None = None) -> Iterator[Text]:
    """The first `limit` texts of a file, answers cut at `most` tokens."""
    for entry in json.loads(path.read_text())[:limit]:
        yield Text(entry["prompt"], entry["answer"][:most])


def load(recipe_name: str, drafter: str, bits: int) -> tuple[Any, Any]:
    """The head, bound to its target, and the target."""
    import mlx.core as mx

    from dspark.checkpoints.drafter import inspect
    from dspark.checkpoints.dtypes import unpack
    from dspark.checkpoints.load import load_model
    from dspark.models.target import Target
    from dspark.recipe import load as load_recipe
    from dspark.stages.draft import DFlash, DFlash2, DSpark

    table = load_recipe(recipe_name).target
    loaded = load_model(str(table.source), revision=table.revision, sha256=table.sha256)
    target = Target(loaded.model, loaded.config, loaded.name)
    stage = {"dspark": DSpark, "dflash": DFlash, "dflash2": DFlash2}[inspect(drafter).kind]
    head = stage(drafter, bits=bits).bind(target).head
    if mx.default_device().type == mx.DeviceType.cpu:
        # A CPU multiplies floats by a BLAS, and packed weights one by one.
        unpack(head, mx.float32)
    return head, target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="a drafter's folder")
    parser.add_argument("texts", type=Path, help="a JSON file of texts")
    parser.add_argument("--bits", type=int, default=0, help="pack the drafter's large weights (0: as stored)")
    parser.add_argument("--limit", type=int, help="only so many texts")
    parser.add_argument("--tokens", type=int, help="of each answer only so many tokens")
    parser.add_argument("--recipe", default="smollm2-135m", help="whose target")
    options = parser.parse_args()
    blas = open_blas()
    head, target = load(options.recipe, options.drafter, options.bits)
    texts = list(read_texts(options.texts, options.limit, options.tokens))
    began = time.perf_counter()
    say = lambda line: print(line, file=sys.stderr, flush=True)
    for name, tally in replay(head, target, texts, say).items():
        print(f"{name:<46} {tally.accepted_length:.3f} tokens a round ({tally.tokens} tokens, {tally.rounds} rounds)")
    weights = f"{options.bits}-bit" if options.bits else "as stored"
    print(f"{len(texts)} texts, drafter {weights}, {blas.name}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
