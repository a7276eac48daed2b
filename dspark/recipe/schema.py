"""The converter for recipes: roles become tables with a `kind`, and unknown keys are told where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

import attrs
from cattrs import Converter
from cattrs.gen import make_dict_unstructure_fn, override

import dspark.stages.draft  # noqa: F401  (registers its kinds)
from dspark.caps import AbstractCap, FixedCap
from dspark.errors import InputError, did_you_mean
from dspark.recipe.document import AUTO, AcceptChoice, Recipe
from dspark.recipe.faults import Fault, Keys, UnknownKeys, faults_of, show, without_name
from dspark.recipe.strict import fields_of, make_converter, unknown_key
from dspark.recipe.values import WORDS, Hook, is_mapping
from dspark.stages.base import AbstractAccept, AbstractDraft, AbstractRollback
from dspark.stages.registry import KINDS, kind_of
from dspark.stages.warp import AbstractWarp, Warps

ROLES: dict[type, str] = {
    AbstractDraft: "draft",
    AbstractAccept: "accept",
    AbstractRollback: "rollback",
    AbstractCap: "cap",
    AbstractWarp: "warp",
}
# For these `[sampling]` makes the chain of warps, unless [accept] has one.
SAMPLED = (AUTO, "greedy", "rejection", "sample-match")
WORDS.update(dict.fromkeys(ROLES, "a table with a kind"))


def structure(data: Mapping[str, Any]) -> tuple[Recipe | None, list[tuple[Keys, str]]]:
    """A recipe, or every fault with its key path, in the order of the file."""
    try:
        return CONVERTER.structure(data, Recipe), []
    except Exception as error:
        found = list(faults_of(error))
    places = {keys: place for place, keys in enumerate(_walk(data))}
    return None, sorted(found, key=lambda fault: _place(fault[0], places))


def unstructure(thing: Any) -> Any:
    """Plain data with only what is not a default."""
    return CONVERTER.unstructure(thing)


def default_of(recipe: Recipe, keys: Keys) -> Any:
    """What a recipe's key is when it does not say so, as plain data; None where there is no default."""
    place: Any = recipe
    for key in keys[:-1]:
        try:
            place = getattr(place, key) if isinstance(key, str) and attrs.has(type(place)) else place[key]
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
    field = attrs.fields_dict(type(place)).get(str(keys[-1])) if attrs.has(type(place)) else None
    if field is None or field.default is attrs.NOTHING:
        return None
    default: Any = field.default
    if hasattr(default, "factory"):
        default = default.factory(place) if default.takes_self else default.factory()
    return unstructure(default)


def role_of(cls: type) -> str | None:
    """The role that a stage's class plays, or None."""
    return next((role for base, role in ROLES.items() if issubclass(cls, base)), None)


def _walk(data: Any, at: Keys = ()) -> Any:
    yield at
    items = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from _walk(value, (*at, key))


def _place(keys: Keys, places: Mapping[Keys, int]) -> tuple[int, int]:
    """Where a key stands in the file; a missing one stands with the table that it is missing from."""
    for size in range(len(keys), -1, -1):
        if keys[:size] in places:
            return places[keys[:size]], len(keys) - size
    return -1, 0


def _make() -> Converter:
    converter = make_converter(_unknown)
    read, write = converter.structure, converter.unstructure
    for base, role in ROLES.items():
        converter.register_structure_hook_func(lambda t, base=base: t is base, _reader(role, converter))
    # The latest hook that fits is taken: plain tables, then stages, then the types that fields are declared with.
    converter.register_unstructure_hook_factory(attrs.has, lambda t: _plain_writer(t, converter))
    converter.register_unstructure_hook_factory(
        lambda t: isinstance(t, type) and role_of(t) is not None, lambda t: _writer(t, converter)
    )
    converter.register_unstructure_hook_func(lambda t: t in ROLES, lambda stage: write(stage, type(stage)))
    converter.register_structure_hook_func(lambda t: t is Warps, lambda v, _: Warps(read(v, tuple[AbstractWarp, ...])))
    converter.register_unstructure_hook_func(lambda t: t is Warps, lambda chain: [write(link) for link in chain.links])
    converter.register_structure_hook_func(lambda t: t == AcceptChoice, lambda v, _: _read_accept(v, converter))
    converter.register_unstructure_hook_func(lambda t: t == AcceptChoice, lambda v: _write_accept(v, converter))
    converter.register_unstructure_hook_func(is_mapping, lambda v: {str(key): write(inner) for key, inner in v.items()})
    return converter


def _reader(role: str, converter: Converter) -> Hook:
    def read(value: Any, _: Any) -> Any:
        kinds = KINDS[role]
        if role == "cap" and type(value) is int:
            return _fixed(value)
        kind = _kind(value, role, kinds)
        return converter.structure({k: v for k, v in value.items() if k != "kind"}, kinds[kind])

    return read


def _kind(value: Any, role: str, kinds: Iterable[str]) -> str:
    """The kind that a role's table names."""
    if not isinstance(value, Mapping):
        hint = f"; write kind = {value!r} under [{role}]" if isinstance(value, str) and value in kinds else ""
        raise Fault(f"expected {'an integer or ' if role == 'cap' else ''}a table, got {show(value)}{hint}")
    allowed = f"allowed: {', '.join(sorted(kinds))}"
    if "kind" not in value:
        raise Fault(f"required key is missing; {allowed}", "kind")
    kind = value["kind"]
    if not isinstance(kind, str) or kind not in kinds:
        near = did_you_mean(kind, kinds) if isinstance(kind, str) else ""
        word = role if role in ("cap", "warp") else "stage"
        raise Fault(f"unknown {word} {show(kind)}; {allowed}{near}", "kind")
    return kind


def _read_accept(value: Any, converter: Converter) -> AbstractAccept | str:
    kind = _kind(value, "accept", {AUTO, *KINDS["accept"]})
    rest = sorted(value.keys() - {"kind"})
    if kind == AUTO and rest:
        raise UnknownKeys({key: _unknown(key, AbstractAccept, []) for key in rest})
    return kind if kind in SAMPLED and not rest else converter.structure(value, AbstractAccept)


def _write_accept(accept: AbstractAccept | str, converter: Converter) -> dict[str, Any]:
    if isinstance(accept, str):
        return {"kind": accept}
    # The chain is said even where it is empty, for a kind alone leaves it to [sampling].
    return {"warp": [], **converter.unstructure(accept)} if hasattr(accept, "warp") else converter.unstructure(accept)


def _fixed(value: int) -> FixedCap:
    try:
        return FixedCap(value)
    except InputError as error:
        raise Fault(without_name(str(error), "cap", value)) from None


def _writer(cls: type, converter: Converter) -> Callable[[Any], Any]:
    role = role_of(cls)
    kind = kind_of(str(role), cls)
    if kind is None or not attrs.has(cls):
        name = f"{cls.__module__}.{cls.__qualname__}"
        raise Fault(f"{name} has no word in recipes; give it one with @dspark.register_{role}(...)")
    plain = _plain_writer(cls, converter)

    def write(stage: Any) -> Any:
        if isinstance(stage, FixedCap) and stage == FixedCap(stage.cap):
            return stage.cap
        return {"kind": kind, **plain(stage)}

    return write


def _plain_writer(cls: Any, converter: Converter) -> Callable[[Any], dict[str, Any]]:
    keys = {a.name for a in fields_of(cls)}
    hidden: dict[str, Any] = {a.name: override(omit=True) for a in attrs.fields(cls) if a.name not in keys}
    fill = make_dict_unstructure_fn(cls, converter, _cattrs_omit_if_default=True, **hidden)

    def write(thing: Any) -> dict[str, Any]:
        made = fill(thing)
        for key, value in made.items():
            if value is None:
                raise Fault(f"{cls.__name__}.{key} is None, which a recipe cannot say because it is not the default")
        return made

    return write


def _unknown(key: str, cls: type, keys: list[str]) -> str:
    """What a table knows, and where a key that it does not know belongs."""
    known = ["kind", *keys] if role_of(cls) else keys
    types = get_type_hints(Recipe)
    tables = {a.name: types[a.name] for a in fields_of(Recipe)}
    if cls is not Recipe and key in tables:
        return f"unknown key; {key!r} belongs to the top of the file, before the first [table]"
    text = unknown_key(key, cls, known)
    if "did you mean" in text:
        return text
    owners = [name for name, table in tables.items() if attrs.has(table) and key in _names(table)]
    return f"{text}; it belongs to [{owners[0]}]" if owners else text


def _names(cls: Any) -> set[str]:
    return {a.name for a in fields_of(cls)}


CONVERTER = _make()
