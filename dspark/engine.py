"""An engine: a pipeline bound to a loaded target, its rollback planned and proved. `open` starts a session on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from dspark.buffers.footprint import Footprint, footprint
from dspark.buffers.plan import Plan
from dspark.buffers.probe import prove
from dspark.buffers.quantize import KVBits
from dspark.buffers.single import SingleBuffers
from dspark.errors import InputError
from dspark.explain import explain_bound, table
from dspark.pipeline import Pipeline
from dspark.platform import memory_total, size_text
from dspark.prompt import check_context, encode, has_template
from dspark.records import Opening, RoundEvent, Settled, Tokens
from dspark.rows import Request
from dspark.session import Session, SessionOptions
from dspark.stages.accept import Sampling
from dspark.stages.keys import fresh_seed, row_seeds
from dspark.transcript import Transcript

MAX_SEED = 2**64 - 1
# Tokens whose caches fit anywhere: not worth a look at the memory.
SMALL_PROMPTS = 4096


class TokenText:
    """Stands in for a detokenizer where there is no tokenizer: no text at all."""

    last_segment = ""

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...


@attrs.frozen(eq=False)
class Engine:
    """What a session needs. Immutable; sessions opened on it share the weights and nothing else.

    sampling: the default where a session names none, None for the pipeline's own accept stage; accept_kind: "auto" or a
    kind that sampling is forced to; stop_tokens: end the answer; costs: this machine's cost curve or None; notes: what the
    user should be told once; proof: what the probe of the rollback found; calibration: what `costs` come from
    (`calibrate.apply.Applied`) or None; kernels: the target's own ones (`kernels.enable.Kernels`), None for MLX's; chat, seed:
    defaults where a session names none; kv: how KV caches are quantised.
    """

    pipeline: Pipeline
    target: Any
    tokenizer: Any
    plan: Plan
    sampling: Sampling | None = None
    accept_kind: str = "auto"
    stop_tokens: frozenset[int] = frozenset()
    context_length: int | None = None
    costs: Any = None
    notes: tuple[str, ...] = ()
    proof: Any = None
    chat: Chat = attrs.field(factory=lambda: Chat())
    seed: int | None = None
    kv: KVBits | None = None
    calibration: Any = None
    kernels: Any = None
    _learned: Learned = attrs.field(init=False, factory=lambda: Learned())

    def open(
        self,
        prompt: str | Sequence[Any],
        *,
        max_tokens: int | Sequence[int] = 256,
        sampling: Sampling | Sequence[Sampling] | None = None,
        seed: int | Sequence[int] | None = None,
        stop: str | Sequence[str] | Sequence[Sequence[str]] = (),
        chat: Chat | None = None,
        options: SessionOptions | None = None,
        sinks: Sequence[Callable[[RoundEvent], None]] = (),
    ) -> Session:
        """Open a session on a text, on messages, on token ids, or on a list of texts or id lists (decoded together).

        max_tokens, sampling and seed: one for all or one a prompt; no seed means fresh entropy. stop: strings that end the
        text, a string or a list of strings for all prompts, a list of lists for one list a prompt. Raises InputError for a
        prompt or option that cannot be used. Prefill happens at the first step.
        """
        prompts = list(prompt) if _several(prompt) else [prompt]
        n = len(prompts)
        seed = self.seed if seed is None else seed
        limits = _each(max_tokens, n, "max_tokens")
        chosen = _each(sampling, n, "sampling")
        seeds = list(row_seeds(_seed(seed), n)) if seed is None or isinstance(seed, int) else [_seed(s) for s in seed]
        if len(seeds) != n:
            raise InputError(f"seed has {len(seeds)} entries for {n} prompts; give one for all or one a prompt")
        requests = []
        for text, limit, warp, row_seed, stops in zip(prompts, limits, chosen, seeds, _stops(stop, n), strict=True):
            ids = self.encode(text, chat)
            room = check_context(ids, self.context_length, _limit(limit))
            requests.append(Request(ids, self.accept(warp), row_seed, room, stops))
        options = options or SessionOptions(sinks=sinks, batch=n)
        self._check_room(requests, options.batch)
        return Session(self, requests, options)

    def encode(self, prompt: str | Sequence[Any], chat: Chat | None = None) -> Tokens:
        """Token ids of a text, messages or ids, as `open` takes them. Raises InputError where they cannot be used."""
        chat = chat or self.chat
        return encode(self.tokenizer, prompt, system=chat.system, raw=chat.raw, template=chat.template)

    @cached_property
    def footprint(self) -> Footprint:
        """What one row's caches take. Builds the graph of a forward of one token; nothing is computed."""
        caches = self.target.make_caches()
        self.target(mx.array([[0]]), caches)
        return footprint(caches, self.kv)

    def _check_room(self, requests: Sequence[Request], batch: int) -> None:
        """Raise InputError where the caches of the prompts that are decoded at once cannot fit beside what is loaded."""
        longest = sorted((len(request.prompt) for request in requests), reverse=True)[:batch]
        if sum(longest) < SMALL_PROMPTS:
            return
        room = memory_total() - mx.get_active_memory()
        needed = sum(self.footprint.nbytes(tokens) for tokens in longest)
        if needed > room:
            what = (
                f"the prompt of {longest[0]:,} tokens takes"
                if len(longest) == 1
                else f"{len(longest)} prompts at once take"
            )
            remedy = "shorten it" if len(longest) == 1 else "decode fewer at once"
            raise InputError(
                f"{what} {size_text(needed)} of caches, and this machine has {size_text(max(room, 0))} left for them; {remedy}"
                + ("" if self.kv else ", or quantise the caches (target.kv_bits = 8)")
            )

    def accept(self, sampling: Sampling | None = None) -> Any:
        """The accept stage for these sampling options, or the pipeline's own."""
        sampling = sampling or self.sampling
        if sampling is None:
            return self.pipeline.accept
        return sampling.accept(self.accept_kind, q_known=self.pipeline.draft.knows_q)

    def explain(self) -> str:
        """What this engine does and promises, a line a topic: draft, cap, accept, rollback and its proof, reads."""
        return table(explain_bound(self))

    def transcript(self, request: Request) -> Transcript:
        detokenizer = TokenText() if self.tokenizer is None else self.tokenizer.detokenizer
        return Transcript(detokenizer, self.stop_tokens, request.stops, request.max_tokens)

    def buffers(self) -> SingleBuffers:
        """Empty buffers of one row."""
        return SingleBuffers(self.target.make_caches(), self.plan, self.kv)

    def start(self, opening: Opening, reuse: Session | None) -> tuple[Any, Any, int]:
        """(buffers, the drafter's carry, how many prompt tokens that carry knows) for a new prompt.

        An ended session whose tokens begin the prompt lends its buffers; it must not be used again.
        """
        if reuse is not None and (taken := _take_over(reuse, opening, self.pipeline)) is not None:
            return taken
        return self.buffers(), self.pipeline.draft.init(opening), 0

    def cap_carry(self) -> Any:
        """What the cap of a new session begins with: what was learned in this engine's last one, or the cost curve alone."""
        cap, carry = self.pipeline.cap, self._learned.carry
        return cap.init(self.costs) if carry is None else cap.again(carry, self.costs)

    def learn(self, carry: Any) -> None:
        """Keep the cap's carry of a session for the next one. Sessions at the same time: the last one to end counts."""
        self._learned.carry = carry

    def enter(self) -> contextlib.ExitStack:
        """Device settings for as long as a session lives: on Metal, mlx_lm's wired limit."""
        stack = contextlib.ExitStack()
        if mx.metal.is_available() and hasattr(self.target, "model"):
            stack.enter_context(_generate().wired_limit(self.target.model, [_generate().generation_stream]))
        return stack

    @property
    def stream(self) -> Any:
        """The stream that rounds run on: mlx_lm's own on a GPU, None for the default one on a CPU."""
        return _generate().generation_stream if mx.default_device().type == mx.DeviceType.gpu else None


class Learned:
    """What an engine's sessions leave to the next one. An engine that is made from another one begins anew."""

    carry: Any = None


@attrs.frozen
class Chat:
    """How a text becomes a prompt: a system message, raw text instead of the template, variables for the template."""

    system: str | None = None
    raw: bool = False
    template: Mapping[str, Any] = attrs.field(factory=dict)


def bind(
    pipeline: Pipeline,
    target: Any,
    tokenizer: Any = None,
    *,
    sampling: Sampling | None = None,
    accept_kind: str = "auto",
    stop_tokens: frozenset[int] | None = None,
    context_length: int | None = None,
    notes: tuple[str, ...] = (),
    costs: Any = None,
    chat: Chat | None = None,
    seed: int | None = None,
    kv: KVBits | None = None,
    kernels: Any = None,
    probe: bool = False,
    remember: Path | None = None,
) -> Engine:
    """Give a pipeline a loaded target: checks needs, loads the drafter, plans the rollback.

    probe: prove the plan by a few forwards; remember: a file of what was proved before. `dspark.bind` also loads targets by
    name, and probes. Raises BindError, CheckpointError or SourceError with one sentence.
    """
    pipeline.check(target.provides)
    bound = attrs.evolve(pipeline, draft=pipeline.draft.bind(target))
    plan, proof = pipeline.rollback.plan(target), None
    if kv is not None:
        kv.check(target)
    if probe:
        proof = prove(target, plan, lambda p: SingleBuffers(target.make_caches(), p, kv), remember)
        plan, notes = proof.plan, (*notes, *proof.notes)
    if stop_tokens is None:
        stop_tokens = frozenset(getattr(tokenizer, "eos_token_ids", ()) or ())
    if tokenizer is not None and not has_template(tokenizer):
        notes = (*notes, "this model has no chat template: prompts are taken as raw text")
    own = getattr(target, "context_length", None)
    if context_length is not None and own is not None and context_length > own:
        notes = (
            *notes,
            f"max_context is {context_length:,}, more than the {own:,} tokens that this model allows, which count",
        )
    known = [n for n in (context_length, own) if n is not None]
    return Engine(
        pipeline=bound,
        target=target,
        tokenizer=tokenizer,
        plan=plan,
        sampling=sampling,
        accept_kind=accept_kind,
        stop_tokens=stop_tokens,
        context_length=min(known) if known else None,
        costs=costs,
        notes=notes,
        proof=proof,
        chat=chat or Chat(),
        seed=seed,
        kv=kv,
        kernels=kernels,
    )


def _take_over(old: Session, opening: Opening, pipeline: Pipeline) -> tuple[Any, Any, int] | None:
    """The buffers of an ended session, cut back to what `prompt` shares with it; None where nothing can be kept."""
    left = old.leave()
    if left is None:
        return None
    buffers, state, context = left
    prompt, held = opening.prompts[0], buffers.held[0]
    shared = next(
        (i for i, (a, b) in enumerate(zip(context, prompt, strict=False)) if a != b), min(len(context), len(prompt))
    )
    if shared > held and len(prompt) > held:
        draft = pipeline.draft.skip(state.settled, state.draft)
        return buffers, pipeline.draft.resume(draft, opening), held + 1
    keep = min(shared, held, len(prompt) - 1)
    if keep < 1 or pipeline.draft.target_layer_ids or not buffers.trim(keep):
        return None
    told = Settled(mx.array([[prompt[keep]]]), (prompt[: keep + 1],), None, (0,), (keep,))
    return buffers, pipeline.draft.skip(told, pipeline.draft.init(opening)), keep + 1


def _generate() -> Any:
    import importlib

    return importlib.import_module("mlx_lm.generate")


def _several(prompt: Any) -> bool:
    """Whether a prompt is a list of prompts: texts, or lists of ids or messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and all(isinstance(p, str | list | tuple) for p in prompt)


def _each(value: Any, n: int, name: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        return [value] * n
    if len(value) != n:
        raise InputError(f"{name} has {len(value)} entries for {n} prompts; give one for all or one a prompt")
    return list(value)


def _limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"max_tokens is {value!r}; it must be a whole number, 0 or more")
    return value


def _seed(value: Any) -> int:
    if value is None:
        return fresh_seed()
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
        raise InputError(f"seed is {value!r}; it must be a whole number from 0 to 2^64 - 1")
    return value


def _stops(stop: Any, n: int) -> list[tuple[str, ...]]:
    """The stop strings of each of `n` prompts. A flat list is for all of them, however long it is: only lists in a list are
    one a prompt."""
    if isinstance(stop, str):
        return [_strings((stop,))] * n
    lists = [isinstance(entry, list | tuple) for entry in stop]
    if not any(lists):
        return [_strings(stop)] * n
    if not all(lists):
        raise InputError("stop mixes strings and lists; give strings for all prompts, or a list of strings a prompt")
    return [_strings(entry) for entry in _each(list(stop), n, "stop")]


def _strings(stops: Sequence[Any]) -> tuple[str, ...]:
    for text in stops:
        if not isinstance(text, str):
            raise InputError(f"stop holds {text!r}, which is no text")
        if not text:
            raise InputError("stop holds an empty string; give the text that should end the answer")
    return tuple(stops)
