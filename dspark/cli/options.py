"""The options of `dspark run` as one record, and the function that typer reads its command line from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import attrs
import typer

from dspark.errors import InputError, did_you_mean

LIVE = ("auto", "table", "line", "off")


def _real(name: str) -> Any:
    """attrs converter: an option's text as a number. Raises InputError."""

    def convert(value: str | float | None) -> float | None:
        try:
            return None if value is None else float(value)
        except ValueError:
            raise InputError(f"{name} is {value!r}; it must be a number") from None

    return convert


def whole(name: str, least: int | None = None) -> Any:
    """attrs converter: an option's text as a whole number. Raises InputError."""

    def convert(value: str | int | None) -> int | None:
        if value is None:
            return None
        wanted = "a whole number" if least is None else f"a whole number of at least {least}"
        try:
            number = int(value)
        except ValueError:
            raise InputError(f"{name} is {value!r}; it must be {wanted}") from None
        if least is not None and number < least:
            raise InputError(f"{name} is {number}; it must be {wanted}")
        return number

    return convert


def _stops(value: Any) -> Any:
    if "" in (value or ()):
        raise InputError("--stop is empty; give the text that should end the answer")
    return tuple(value or ())


def _live(value: str) -> str:
    if value not in LIVE:
        raise InputError(f"--live is {value!r}; allowed: {', '.join(LIVE)}{did_you_mean(value, LIVE)}")
    return value


def option(*names: str, **kwargs: Any) -> Any:
    return typer.Option(*names, show_default=kwargs.pop("show_default", False), **kwargs)


def complete_recipe(incomplete: str) -> list[str]:
    """Names of shipped recipes that begin so."""
    from dspark.shipped import shipped

    return [name for name, _ in shipped() if name.startswith(incomplete)]


# What several commands take.
RecipeName = Annotated[
    str,
    typer.Argument(
        help="A shipped recipe's name, a file, or hf://user/repo/file.toml.", autocompletion=complete_recipe
    ),
]
TargetSource = Annotated[
    str | None, option(help="Another target: a hub repository, folder or GGUF file.", metavar="SOURCE")
]
DrafterSource = Annotated[str | None, option(help="Another source for the drafter's weights.", metavar="SOURCE")]
Dtype = Annotated[str | None, option(help="Compute in float32, float16, bfloat16, or as stored.", metavar="NAME")]
Settings = Annotated[
    list[str] | None,
    option("--set", help="Override a key of the recipe, as in draft.min_ngram=5. Repeatable.", metavar="KEY=VALUE"),
]
NoCalibrate = Annotated[bool, option("--no-calibrate", help="Do not measure this machine at a recipe's first run.")]
OnlyReport = Annotated[bool, option("--quiet", "-q", help="Nothing but the report and errors.")]


@attrs.frozen
class RunOptions:
    """What `dspark run` was told. A None leaves it to the recipe, and the recipe leaves it to the model."""

    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A shipped recipe's name, a file, or hf://user/repo/file.toml; auto or nothing finds one for --target.",
            autocompletion=complete_recipe,
            show_default=False,
        ),
    ] = None
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing at all reads standard input.", show_default=False)
    ] = None
    file: Annotated[str | None, option(help="Read the prompt from a file, or with --batch many.", metavar="PATH")] = (
        None
    )
    batch: Annotated[
        str | None,
        option(
            help="Answer many prompts, N at once: a line each of a .txt file, else JSON lines. Prints JSON lines.",
            metavar="N",
        ),
    ] = attrs.field(default=None, converter=whole("--batch", 1))
    messages: Annotated[
        str | None, option(help="Read a conversation from a JSON file: a list of {role, content}.", metavar="FILE.json")
    ] = None

    target: TargetSource = None
    drafter: DrafterSource = None
    adapter_path: Annotated[str | None, option(help="LoRA adapters as mlx_lm writes them.", metavar="FOLDER")] = None
    dtype: Dtype = None
    cap: Annotated[str | None, option(help="Most drafted tokens a round.", metavar="N")] = attrs.field(
        default=None, converter=whole("--cap")
    )
    plain: Annotated[bool, option("--plain", help="No drafting: the target alone.")] = False
    settings: Settings = None
    no_probe: Annotated[bool, option("--no-probe", help="Do not prove the rollback before the run.")] = False
    no_calibrate: NoCalibrate = False

    system: Annotated[str | None, option(help="The system message.", metavar="TEXT")] = None
    raw: Annotated[bool, option("--raw", help="Take the prompt as it stands, without the chat template.")] = False
    thinking: Annotated[
        bool | None, option("--thinking/--no-thinking", help="Ask the chat template for reasoning, or for none.")
    ] = None
    reasoning_effort: Annotated[
        str | None, option(help="For chat templates that know it: low, medium, high.", metavar="WORD")
    ] = None
    chat_template_kwargs: Annotated[
        str | None, option(help="Further variables of the chat template.", metavar="JSON")
    ] = None

    max_tokens: Annotated[str, option(help="Most tokens of the answer.", metavar="N", show_default=True)] = attrs.field(
        default="512", converter=whole("--max-tokens", 0)
    )
    max_context: Annotated[str | None, option(help="Most tokens of prompt and answer.", metavar="N")] = attrs.field(
        default=None, converter=whole("--max-context")
    )
    stop: Annotated[
        list[str] | None, option(help="End the answer in front of this text. Repeatable.", metavar="TEXT")
    ] = attrs.field(default=None, converter=_stops)
    temperature: Annotated[str | None, option(help="0 is greedy.", metavar="X")] = attrs.field(
        default=None, converter=_real("--temperature")
    )
    top_p: Annotated[str | None, option(help="Nucleus sampling, 0 to 1.", metavar="X")] = attrs.field(
        default=None, converter=_real("--top-p")
    )
    top_k: Annotated[str | None, option(help="Keep the k likeliest tokens; 0 is off.", metavar="N")] = attrs.field(
        default=None, converter=whole("--top-k")
    )
    min_p: Annotated[str | None, option(help="Keep tokens this likely, relative to the best.", metavar="X")] = (
        attrs.field(default=None, converter=_real("--min-p"))
    )
    seed: Annotated[str | None, option(help="Repeat a run: 0 to 2^64 - 1.", metavar="N")] = None

    live: Annotated[
        str,
        option(
            help="What to show on the terminal meanwhile: auto, table, line, off.",
            metavar="VIEW",
            show_default=True,
            autocompletion=lambda incomplete: [view for view in LIVE if view.startswith(incomplete)],
        ),
    ] = attrs.field(default="auto", converter=_live)
    quiet: Annotated[bool, option("--quiet", "-q", help="Nothing but the text and errors.")] = False
    events: Annotated[str | None, option(help="Write telemetry, a line of JSON a round.", metavar="FILE.jsonl")] = None
    json: Annotated[
        bool, option("--json", help="Print one JSON object at the end instead of the text; with --batch, every figure.")
    ] = False


def record_command(record: Any, call: Callable[[Any], int]) -> Callable[..., int]:
    """A function with a parameter for each field of `record`, as typer reads it, that calls `call` with the record."""
    hints = get_type_hints(record, include_extras=True)

    def command(**values: Any) -> int:
        return call(record(**values))

    command.__doc__ = call.__doc__
    command.__annotations__ = {**hints, "return": int}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is attrs.NOTHING else field.default,
                annotation=hints[field.name],
            )
            for field in attrs.fields(record)
        ],
        return_annotation=int,
    )
    return command
