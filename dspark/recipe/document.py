"""What a recipe says, schema 1: one table a role. `kind` picks a stage, the other keys are its field names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import attrs

from dspark.caps import AbstractCap, AdaptiveCap
from dspark.errors import InputError
from dspark.pipeline import Pipeline, chain
from dspark.stages.accept import Sampling
from dspark.stages.base import AbstractAccept, AbstractDraft, AbstractRollback
from dspark.stages.keys import check_seed
from dspark.stages.prefill import Prefill, positive
from dspark.stages.rollback import RollbackAuto
from dspark.stages.verify import Verify

if TYPE_CHECKING:
    from dspark.engine import Engine

SCHEMA = 1
AUTO = "auto"
AcceptChoice = AbstractAccept | str
UNLISTED = {"key": False}


def _not_empty(instance: Any, attribute: Any, value: str | None) -> None:
    if value is not None and not value.strip():
        raise InputError(f"{attribute.name} is empty; drop the key or give it a value")


def _digest(instance: Any, attribute: Any, value: str | None) -> None:
    if value is not None and not re.fullmatch(r"[0-9a-f]{64}", value):
        raise InputError(
            f"{attribute.name} is {value[:70]!r}; expected the 64 hexadecimal digits of the file's SHA-256"
        )


def _optional_positive(instance: Any, attribute: Any, value: int | None) -> None:
    if value is not None:
        positive(instance, attribute, value)


def _seed(instance: Any, attribute: Any, value: int | None) -> None:
    if value is not None:
        check_seed(value)


@attrs.frozen
class TargetTable:
    """`[target]`: which model, and how it is held.

    source: a hub repository, a folder, a GGUF file or `wheel:NAME==VERSION:PATH`; None leaves it to `--target`. config: what
    the config.json of another copy of this model must say, for the recipe to be found by it (`recipe.match`). revision:
    branch, tag or commit of a repository. sha256: of the file, demanded for wheels. adapter_path: LoRA weights as mlx-lm
    writes them. dtype: what to compute in, by default the platform's rule. kv_bits, kv_group_size: a quantised KV cache.
    max_context: most tokens of prompt and answer.
    """

    source: str | None = attrs.field(default=None, validator=_not_empty)
    config: Mapping[str, int | str] = attrs.field(factory=dict)
    revision: str | None = attrs.field(default=None, validator=_not_empty)
    sha256: str | None = attrs.field(default=None, validator=_digest)
    adapter_path: str | None = attrs.field(default=None, validator=_not_empty)
    dtype: Literal["float32", "float16", "bfloat16", "stored"] | None = None
    kv_bits: Literal[4, 8] | None = None
    kv_group_size: Literal[32, 64, 128] = 64
    max_context: int | None = attrs.field(default=None, validator=_optional_positive)

    def __attrs_post_init__(self) -> None:
        if (self.source or "").startswith("wheel:") and self.sha256 is None:
            raise InputError("sha256 must be given: weights from a wheel are used only with their file's digest")


@attrs.frozen
class ChatTable:
    """`[chat]`: how prompts become tokens.

    system: the system message. raw: no chat template. thinking: False asks the template to leave reasoning out.
    reasoning_effort: for templates that know it. template: any other variables of the template.
    """

    system: str | None = None
    raw: bool = False
    thinking: bool | None = None
    reasoning_effort: str | None = attrs.field(default=None, validator=_not_empty)
    template: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class SamplingTable:
    """`[sampling]`: how a run chooses tokens unless it is told otherwise. A key that is not said keeps the model's default.

    Keys are those of `Sampling`, and `seed`, 0 to 2^64 - 1, without which every run draws anew.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float | None = None
    repetition_context: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    seed: int | None = attrs.field(default=None, validator=_seed)

    def __attrs_post_init__(self) -> None:
        self.over(Sampling())

    @property
    def said(self) -> dict[str, Any]:
        """The keys that the recipe says, less the seed."""
        return {k: v for k, v in attrs.asdict(self, recurse=False).items() if v is not None and k != "seed"}

    def over(self, defaults: Sampling) -> Sampling:
        """`defaults` with what the recipe says. Raises InputError where that makes no sense."""
        return attrs.evolve(defaults, **self.said)


@attrs.frozen
class KernelsTable:
    """`[kernels]`: which kernels multiply by the target's weights.

    mode: "auto" takes others than MLX's own for the shapes where this machine found them right and faster; "stock" never.
    """

    mode: Literal["auto", "stock"] = "auto"


class Change(NamedTuple):
    """A key that did not keep the file's value: `old` is the file's or the default, `source` who changed it."""

    key: str
    old: Any
    new: Any
    source: str

    def __str__(self) -> str:
        return f"{self.key} = {self.new}" if self.old is None else f"{self.key} {self.old} -> {self.new}"


@attrs.frozen(kw_only=True)
class Recipe:
    """A pipeline and its target as data. Read by `load`, written by `dump`; nothing in it is loaded yet.

    accept: a kind ("auto", "greedy", "sample-match", "rejection") for which `sampling` makes the chain of warps, or a whole
    stage with a chain of its own. path: where it was read, None for text. changes: what `--set`, options and calibration
    made of the file's values.
    """

    schema: Literal[1]
    name: str | None = None
    description: str | None = None
    target: TargetTable = attrs.field(factory=TargetTable)
    prefill: Prefill = attrs.field(factory=Prefill)
    draft: AbstractDraft
    accept: AcceptChoice = AUTO
    sampling: SamplingTable = attrs.field(factory=SamplingTable)
    rollback: AbstractRollback = attrs.field(factory=RollbackAuto)
    cap: AbstractCap = attrs.field(factory=AdaptiveCap)
    chat: ChatTable = attrs.field(factory=ChatTable)
    kernels: KernelsTable = attrs.field(factory=KernelsTable)
    path: str | None = attrs.field(default=None, eq=False, metadata=UNLISTED)
    changes: tuple[Change, ...] = attrs.field(default=(), eq=False, metadata=UNLISTED)

    def __attrs_post_init__(self) -> None:
        said = self.sampling.said
        if not isinstance(self.accept, str) and said:
            raise InputError(
                "accept is a stage with a chain of its own, which leaves no place for "
                f"sampling.{next(iter(said))}; drop one of the two"
            )
        if self.accept == "greedy" and said.get("temperature"):
            raise InputError(
                f"accept is greedy, which ignores sampling.temperature = {said['temperature']}; drop one of the two"
            )

    def pipeline(self, defaults: Sampling | None = None) -> Pipeline:
        """The stages, chained. `defaults`: the model's own sampling options, under what the recipe says."""
        accept = self.accept
        if isinstance(accept, str):
            sampling = self.sampling.over(defaults or Sampling())
            accept = sampling.accept(accept, q_known=self.draft.knows_q)
        return chain(self.prefill, self.draft, Verify(), accept, self.rollback, cap=self.cap)

    def bind(self, target: Any = None, tokenizer: Any = None, **how: Any) -> Engine:
        """Load what the recipe names, or put it on a target at hand, and get an engine. `dspark.bind` has the arguments."""
        from dspark.assemble import bind

        return bind(self, target, tokenizer, **how)

    @classmethod
    def of(cls, pipeline: Pipeline) -> Recipe:
        """The recipe of a pipeline, with no target. Raises InputError where it verifies in a way that recipes cannot say."""
        if pipeline.verify != Verify():
            raise InputError(
                f"this pipeline has no recipe: recipes always verify with Verify(), not {pipeline.verify!r}"
            )
        return cls(
            schema=SCHEMA,
            prefill=pipeline.prefill,
            draft=pipeline.draft.written,
            accept=pipeline.accept,
            rollback=pipeline.rollback,
            cap=pipeline.cap,
        )
