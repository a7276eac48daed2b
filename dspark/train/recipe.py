"""Training recipes: which drafter is made for which target, from what data, how long. Strict, like the recipes that run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import attrs

from dspark.errors import InputError, RecipeError
from dspark.recipe.document import TargetTable
from dspark.recipe.faults import faults_of, key_path
from dspark.recipe.strict import make_converter

SCHEMA = 1
SPREAD_TAPS = 5


def _within(low: float, high: float) -> Any:
    def check(instance: Any, attribute: attrs.Attribute, value: Any) -> None:
        if value is not None and not low <= value <= high:
            raise InputError(f"{attribute.name} is {value!r}; it must be from {low:g} to {high:g}")

    return check


def _key(default: Any, low: float, high: float) -> Any:
    return attrs.field(default=default, validator=_within(low, high))


@attrs.frozen(kw_only=True)
class DrafterTable:
    """`[drafter]`: the network. What is not said follows the target (width, heads, MLP, rope).

    block: slots of a block. taps: layers of the target to read, or "spread": five, evenly. markov_rank, confidence: dspark
    only. draft_vocab: rows of a reduced head, the data's most frequent tokens; for dspark and dflash. selector_rank,
    selector_top_k, conv_kernel, conv_group: dflash2 only. mask_token_id: by default a special token that chats do not use.
    """

    kind: Literal["dspark", "dflash", "dflash2"]
    layers: int = _key(5, 1, 64)
    block: int = _key(7, 2, 64)
    taps: tuple[int, ...] | Literal["spread"] = "spread"
    intermediate: int | None = _key(None, 8, 1 << 20)
    markov_rank: int = _key(64, 0, 4096)
    confidence: bool = True
    draft_vocab: int | None = _key(None, 16, 1 << 24)
    selector_rank: int = _key(64, 1, 4096)
    selector_top_k: int = _key(16, 2, 256)
    conv_kernel: int = _key(2, 1, 16)
    conv_group: int = _key(16, 1, 4096)
    mask_token_id: int | None = _key(None, 0, 1 << 24)

    def __attrs_post_init__(self) -> None:
        if self.kind == "dflash2" and self.draft_vocab is not None:
            raise InputError("draft_vocab belongs to dspark and dflash; a dflash2 drafter needs the whole vocabulary")

    @property
    def num_drafts(self) -> int:
        return self.block if self.kind == "dspark" else self.block - 1


@attrs.frozen(kw_only=True)
class DataTable:
    """`[data]`: conversations that the target writes itself, kept in `folder` and taken from there if they are there already.

    questions: how many are drawn. prompts: a text file of prompts, one a line, that are answered too. openings: share of the
    questions that begin with a given opening (arithmetic, code, step by step). question_tokens, answer_tokens: most tokens.
    rows: conversations sampled at once. held_out: conversations kept from training, for evaluation. lengths: the sizes that
    conversations are padded to.
    """

    folder: str
    questions: int = _key(20000, 0, 1 << 24)
    prompts: str | None = None
    openings: float = _key(0.5, 0, 1)
    question_tokens: int = _key(128, 4, 4096)
    answer_tokens: int = _key(400, 8, 16384)
    rows: int = _key(1024, 1, 16384)
    held_out: int = _key(64, 1, 4096)
    seed: int = _key(0, 0, 2**31 - 1)
    lengths: tuple[int, ...] = (256, 384, 512)

    def __attrs_post_init__(self) -> None:
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 16:
            raise InputError(f"lengths is {list(self.lengths)}; they must be ascending sizes from 16")
        if self.questions == 0 and self.prompts is None:
            raise InputError("questions is 0 and there is no file of prompts; one of the two must give some")


@attrs.frozen(kw_only=True)
class OptimiserTable:
    """`[optimiser]`: AdamW with warm-up and a cosine to zero over `steps`, or over as many steps as fit into `seconds` on this
    machine, measured once at the start.

    rows, anchors: conversations a step and blocks in each. ce, l1, kl, confidence_weight, selector_weight: the losses'
    weights; without any of the first three each kind has its own. gamma: weights fall as exp(-slot / gamma); by default 4,
    for dflash 4 up to a block of 8 and 7 above. float32: compute in float32 on a GPU too.
    """

    steps: int | None = _key(None, 1, 1 << 30)
    seconds: float | None = _key(None, 1, 1e7)
    rate: float = _key(1.5e-3, 1e-8, 1)
    warmup: float = _key(0.04, 0, 0.9)
    clip: float = _key(1.0, 1e-6, 1e6)
    decay: float = _key(0.0, 0, 1)
    rows: int = _key(32, 1, 4096)
    anchors: int = _key(128, 1, 8192)
    ce: float | None = _key(None, 0, 100)
    l1: float | None = _key(None, 0, 100)
    kl: float | None = _key(None, 0, 100)
    confidence_weight: float = _key(1.0, 0, 100)
    selector_weight: float = _key(1.0, 0, 100)
    gamma: float | None = _key(None, 0.1, 1000)
    seed: int = _key(42, 0, 2**31 - 1)
    float32: bool = False
    evaluations: int = _key(6, 1, 1000)

    def __attrs_post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InputError("steps or seconds: say exactly one of the two")


@attrs.frozen(kw_only=True)
class OutputTable:
    """`[output]`: where the drafter is written, with its run recipe, log and training state.

    small_vocab: rows of the vocabulary in the small copy (`--pack`), the data's most frequent tokens; for dspark and dflash.
    """

    folder: str
    small_vocab: int | None = _key(None, 16, 1 << 24)


@attrs.frozen(kw_only=True)
class TrainRecipe:
    """A whole training recipe. `folder` is what its relative paths start from."""

    schema: Literal[1]
    target: TargetTable
    drafter: DrafterTable
    data: DataTable
    optimiser: OptimiserTable
    output: OutputTable
    path: str = attrs.field(default="", eq=False, metadata={"key": False})

    def __attrs_post_init__(self) -> None:
        if self.output.small_vocab is None:
            return
        if self.drafter.kind == "dflash2" or self.drafter.draft_vocab is not None:
            raise InputError(
                "small_vocab under [output] belongs to dspark and dflash drafters that are trained on the whole vocabulary"
            )

    def place(self, text: str) -> Path:
        """A path of the recipe: relative ones start where the recipe stands."""
        return Path(self.path).absolute().parent / Path(text).expanduser()

    @property
    def output_folder(self) -> Path:
        return self.place(self.output.folder)

    @property
    def data_folder(self) -> Path:
        return self.place(self.data.folder)


def load_train_recipe(path: str | Path) -> TrainRecipe:
    """Read a training recipe. Raises RecipeError with every fault, InputError where there is no such file."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a training recipe: {error}") from None
    except ValueError as error:
        raise RecipeError(str(path), [f"not valid TOML: {error}"]) from None
    said = data.get("schema")
    if type(said) is int and said != SCHEMA:
        raise RecipeError(
            str(path), [f"schema: the file says {said} and this dspark reads {SCHEMA}; write schema = {SCHEMA}"]
        )
    try:
        recipe = make_converter().structure(data, TrainRecipe)
    except Exception as error:
        faults = [f"{key_path(keys)}: {text}" if keys else text for keys, text in faults_of(error)]
        raise RecipeError(str(path), faults) from None
    if recipe.target.source is None:
        raise RecipeError(str(path), ["target.source: required key is missing; expected a string"])
    return attrs.evolve(recipe, path=str(path))
