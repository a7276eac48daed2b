"""`python -m tests.cli_fake ANSWER DELAY_S ARGS...`: the command line on a target that says ANSWER, without weights.

Reading tokens costs nothing, a forward sleeps DELAY_S seconds; the prompt must be `hi`.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import types
from typing import Any

if __name__ == "__main__" and (spec := importlib.util.find_spec("mlx_lm")):
    # transformers takes seconds to import. Of mlx_lm this needs the caches, and of the loader nothing.
    bare = types.ModuleType("mlx_lm")
    bare.__path__ = list(spec.submodule_search_locations or ())
    loader: Any = types.ModuleType("dspark.checkpoints.load")
    loader.Loaded, loader.load_model = type("Loaded", (), {}), None
    sys.modules |= {"mlx_lm": bare, "dspark.checkpoints.load": loader}

from tests.fakes import STOP, ScriptTarget

PROMPT = "hi"


class BytesDetokenizer:
    """Bytes to text; a character of several bytes comes when it is whole."""

    def __init__(self) -> None:
        self._bytes, self._shown = b"", ""

    def add_token(self, token: int) -> None:
        self._bytes += bytes([token])

    def finalize(self) -> None: ...

    @property
    def last_segment(self) -> str:
        text = self._bytes.decode("utf-8", "ignore")
        fresh, self._shown = text[len(self._shown) :], text
        return fresh


class BytesTokenizer:
    """One token a byte. Imports nothing, unlike mlx-lm's wrapper."""

    eos_token_ids = (STOP,)
    bos_token = chat_template = None
    has_chat_template = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    @property
    def detokenizer(self) -> BytesDetokenizer:
        return BytesDetokenizer()


class SlowTarget(ScriptTarget):
    """A script that takes its time."""

    delay_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(self.delay_s)
        return super().__call__(*args, **kwargs)


def fake_assemble(answer: str, delay_s: float = 0.0, seen: list[Any] | None = None) -> Any:
    """Stands in for `dspark.assemble.assemble`: no weights, the answer known. `seen` collects the recipes."""

    def assemble(recipe: Any, **how: Any) -> Any:
        from dspark.assemble import chat_of
        from dspark.engine import bind
        from dspark.stages.accept import Sampling

        if seen is not None:
            seen.append(recipe)
        target = SlowTarget([0] * (len(PROMPT) - 1) + [*answer.encode(), STOP] + [0] * 40)
        target.delay_s = delay_s
        kind = recipe.accept if isinstance(recipe.accept, str) else "auto"
        return bind(
            recipe.pipeline(), target, BytesTokenizer(), sampling=recipe.sampling.over(Sampling()), accept_kind=kind,
            context_length=recipe.target.max_context, chat=chat_of(recipe.chat), seed=recipe.sampling.seed,
        )  # fmt: skip

    return assemble


def uncalibrated(recipe: Any, engine: Any, *args: Any, **how: Any) -> tuple[Any, Any]:
    """Stands in for `dspark.cli.calibrated.calibrated`: measures nothing and looks nothing up."""
    return recipe, engine


def main() -> int:
    import dspark.assemble
    import dspark.cli.calibrated
    from dspark.cli import main as command

    answer, delay_s, *args = sys.argv[1:]
    dspark.assemble.assemble = fake_assemble(answer.encode().decode("unicode_escape"), float(delay_s))
    dspark.cli.calibrated.calibrated = uncalibrated
    return command(args)


if __name__ == "__main__":
    sys.exit(main())
