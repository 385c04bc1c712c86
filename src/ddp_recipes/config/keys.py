"""Typed keys: a frozen dataclass's fields are the keys of a section of the config, and their types the rules.

``Literal`` lists the allowed values, ``Annotated[int, Range(1)]`` bounds a number.
"""

import dataclasses
import json
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ddp_recipes.errors import RequestError, nearest

T = TypeVar("T")

IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true, false",
    str: "text",
    type(None): "null",
    dict: "names and values",
    list: "a list of names",
}


@dataclass(frozen=True)
class Range:
    """A number at least ``low`` and, if given, at most ``high``."""

    low: float
    high: float | None = None

    def __str__(self) -> str:
        return f"at least {self.low:g}" if self.high is None else f"from {self.low:g} to {self.high:g}"


Count = Annotated[int, Range(1)]
MicroBatches = Annotated[int, Range(1, 65536)]  # torch makes a view for each, so it needs a bound
Positive = Annotated[float, Range(1e-6)]
Seconds = Annotated[float, Range(1, 1e9)]  # what clocks and timeouts of the system take
Natural = Annotated[int, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


def parse(cls: type[T], section: str, values: Mapping[str, Any], *, others: bool = False) -> T:
    """Check the values of one section of the config and return them as ``cls``. What has a default may be left out.

    Args:
        section: the config group, for messages; empty for the top level.
        others: whether keys that ``cls`` does not name are left alone; otherwise they are refused.

    Raises:
        RequestError: a key is unknown or missing, or a value is not allowed.
    """
    prefix = f"{section}." if section else ""
    if not isinstance(values, Mapping):
        raise RequestError(f"{section}={shown(values)} is no section. Allowed: its keys, with their values.")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls, include_extras=True)
    for name in values:
        if name not in fields and not others:
            raise RequestError(
                f"{prefix}{name} is not a key. Keys of {section}: {', '.join(sorted(fields))}.{nearest(name, fields)}"
            )
    values = {name: _as_names(value, hints[name]) if name in fields else value for name, value in values.items()}
    for name, field in fields.items():
        allowed = f"Allowed: {describe(hints[name])}."
        if name in values and not fits(value := values[name], hints[name]):
            near = nearest(str(value), _choices(hints[name]))
            raise RequestError(f"{prefix}{name}={shown(value)} is not allowed. {allowed}{near}")
        if name not in values and field.default is dataclasses.MISSING:
            raise RequestError(f"{prefix}{name} is missing from the config. {allowed}")
    return cls(**{name: values[name] for name in fields if name in values})


def of_environment(hints: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name with the numbers, switches and choices that ``${oc.env:…}`` gives, by their annotations.

    Where a text is allowed, or the variable is not set or does not fit, the value stays as it is written.
    """
    return {name: _found(value, hints[name]) if name in hints else value for name, value in values.items()}


def _found(value: Any, hint: Any) -> Any:
    if not isinstance(value, str) or "${oc.env:" not in value or fits(value, hint):
        return value
    from omegaconf import OmegaConf  # takes 30 ms, and streams that are read by themselves need none of it
    from omegaconf.errors import OmegaConfBaseException

    with suppress(OmegaConfBaseException, ValueError, RecursionError):
        found = OmegaConf.create({"value": value}).value
        if isinstance(found, str) and not fits(found, hint):
            found = json.loads(found.lower())  # True, too
        if fits(found, hint) and not (isinstance(found, int) and found.bit_length() > 63):
            return found
    return value


def _as_names(value: Any, hint: Any) -> Any:
    """Return a list of names as texts: modules in a list have numbers for names, and yaml reads them as such."""
    numbered = isinstance(value, list) and list[str] in _arms(hint) and any(type(each) is int for each in value)
    return [str(each) if type(each) is int else each for each in value] if numbered else value


def _arms(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> list[str]:
    return [str(choice) for arm in _arms(hint) if get_origin(arm) is Literal for choice in get_args(arm)]


def is_plain(hint: Any) -> bool:
    """Whether a type is of numbers, texts and switches alone, so that a value of a yaml can be checked by it."""
    arms = _arms(hint)
    return all(arm in (int, float, bool, str, type(None)) or get_origin(arm) is Literal for arm in arms)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a config is of this type."""
    if len(arms := _arms(hint)) > 1:
        return any(fits(value, arm) for arm in arms)
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        base, bound = arguments
        return fits(value, base) and value >= bound.low and (bound.high is None or value <= bound.high)
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if isinstance(value, bool):
        return kind is bool
    if kind is list:
        return isinstance(value, list) and all(fits(item, *arguments) for item in value)
    return isinstance(kind, type) and isinstance(value, (int, float) if kind is float else kind)  # not Any


def require(key: str, value: Any, hint: Any) -> None:
    """Refuse a value of a config that is not of this type.

    Raises:
        RequestError: says what is allowed.
    """
    if not fits(value, hint):
        raise RequestError(f"{key}={shown(value)} is not allowed. Allowed: {describe(hint)}.")


def describe(hint: Any) -> str:
    """Return in words what a type allows."""
    if len(arms := _arms(hint)) > 1:
        return ", or ".join(map(describe, arms))
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        base, bound = arguments
        return f"{describe(base)} {bound}"
    if kind is list and not {str} & set(_arms(arguments[0])):
        return "a list of numbers"
    return ", ".join(map(str, arguments)) if kind is Literal else IN_WORDS[kind]


def shown(value: Any) -> str:
    """Return a value as a yaml has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
