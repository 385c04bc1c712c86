"""Shards of JSON objects, one a line, and the kinds of numbers in their columns."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import nan
from typing import Any

import numpy as np
import torch

from ddp_recipes.streams.reader import BadRow, BadShard, Row
from ddp_recipes.streams.records import Offsets, Text

Kind = str | dict[str, "Kind"]  # of an object one for each name
KINDS = ("nothing", "texts", "booleans", "whole numbers", "numbers")  # the last that is there is a column's
_OF_TYPE = {str: "texts", bool: "booleans", int: "whole numbers", float: "numbers"}
_DTYPES = {"booleans": torch.bool, "whole numbers": torch.int64, "numbers": torch.float32}
_MAKES: dict[str, Callable[[Any], Any]] = {"booleans": bool, "whole numbers": int, "numbers": float}
ROWS = 1024  # that are looked at together


class JsonLines(Text):
    """JSON objects, one a line.

    JSON knows one kind of numbers, and many write 1.0 as 1. Once :meth:`typed` was called those of a column are of one
    kind, and lists of numbers tensors of it; as long as it was not, each number is what it looks like.
    """

    @staticmethod
    def may_be_blank(content: Any, starts: Offsets, ends: Offsets) -> Offsets:
        """Return which lines may be blank: those that begin so."""
        first = np.frombuffer(content, dtype=np.uint8)[starts]
        return np.flatnonzero(np.isin(first, np.frombuffer(b" \t\r\n\v\f", dtype=np.uint8)))

    def row(self, number: int) -> Row:
        found = self._object(number)
        try:
            return {name: self._makes[name](value) if name in self._makes else value for name, value in found.items()}
        except OverflowError as error:
            raise BadRow(f"it has a number that is too large: {error}") from error

    _makes: Mapping[str, Callable[[Any], Any]] = {}

    def _object(self, number: int) -> Row:
        try:
            found = json.loads(self.bytes_of(number).rstrip())  # without blank lines behind it
        except (ValueError, RecursionError) as error:
            raise BadRow(f"it is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise BadRow(f"it is a JSON {type(found).__name__}, not an object")
        return found

    def typed(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        self._makes = {name: make for name, kind in columns.items() if (make := _column(_parsed(kind))) is not None}

    def found_types(self) -> dict[str, str]:
        """Return the kinds of the columns, from all rows that can be read.

        Raises:
            BadShard: no row can.
        """
        found: dict[str, Kind] = {}
        wrong: BadRow | None = None
        read = 0
        for first in range(0, len(self), ROWS):
            rows = []
            for number in range(first, min(first + ROWS, len(self))):
                try:
                    rows.append(self._object(number))
                except BadRow as error:  # of which whoever needs it is told
                    wrong = wrong or error
            found, read = _both(found, _of_objects(rows)), read + len(rows)
        if wrong is not None and not read:
            raise BadShard(f"it has no JSON object, and should have one a line: of the first line {wrong}")
        return {name: kind if isinstance(kind, str) else json.dumps(kind) for name, kind in found.items()}

    @staticmethod
    def together(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
        """Return the columns of rows that have these or those: a name that a row has not is no error of its shard."""
        parsed = [{name: _parsed(kind) for name, kind in each.items()} for each in (one, other)]
        return {name: kind if isinstance(kind, str) else json.dumps(kind) for name, kind in _both(*parsed).items()}


def _parsed(kind: str) -> Kind:
    found: Kind = json.loads(kind) if kind.startswith("{") else kind
    return found


def _of_objects(objects: Sequence[Mapping[str, Any]]) -> dict[str, Kind]:
    names = dict.fromkeys(chain.from_iterable(objects))
    return {name: _kind([each[name] for each in objects if name in each]) for name in names}


def _kind(values: Sequence[Any]) -> Kind:
    """Return the kind of some values, those in lists among them."""
    types = {*map(type, values)}
    found: Kind = max((_OF_TYPE.get(each, KINDS[0]) for each in types), key=KINDS.index, default=KINDS[0])
    if list in types:
        inside = [*chain.from_iterable(each for each in values if type(each) is list)]
        found = _wider(found, _kind(inside))
    if dict in types:
        found = _wider(found, _of_objects([each for each in values if type(each) is dict]))
    return found


def _both(one: Mapping[str, Kind], other: Mapping[str, Kind]) -> dict[str, Kind]:
    return {**one, **{name: _wider(kind, one[name]) if name in one else kind for name, kind in other.items()}}


def _wider(one: Kind, other: Kind) -> Kind:
    """Return the kind of what is of one or the other."""
    if isinstance(one, dict) and isinstance(other, dict):
        return _both(one, other)
    if isinstance(one, dict) or isinstance(other, dict):
        return one if isinstance(one, dict) else other
    return max(one, other, key=KINDS.index)


def _column(kind: Kind) -> Callable[[Any], Any] | None:
    """Return what makes a column's values of a kind, and tensors of its lists; None where they stay as they are."""
    if (make := _of_kind(kind)) is None or isinstance(kind, dict):
        return make
    dtype = _DTYPES[kind]

    def of_column(value: Any) -> Any:
        if type(value) is not list:
            return make(value)
        for given in (lambda: value, lambda: make(value)):  # the second has no null among numbers
            try:
                return torch.tensor(given(), dtype=dtype)
            except (TypeError, ValueError, OverflowError, RuntimeError):  # of no shape, with nulls, or too large
                continue
        return make(value)

    return of_column


def _of_kind(kind: Kind) -> Callable[[Any], Any] | None:
    if isinstance(kind, dict):
        makes = {name: make for name, own in kind.items() if (make := _of_kind(own)) is not None}
        return (lambda value: _object_of(value, makes)) if makes else None
    if (number := _MAKES.get(kind)) is None:
        return None
    missing = nan if kind == KINDS[-1] else None  # as in lists of parquet files

    def of_kind(value: Any) -> Any:
        if type(value) in (bool, int):
            return number(value)
        if type(value) is list:
            return [missing if each is None else of_kind(each) for each in value]
        return value

    return of_kind


def _object_of(value: Any, makes: Mapping[str, Callable[[Any], Any]]) -> Any:
    if isinstance(value, list):
        return [_object_of(each, makes) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: makes[name](inside) if name in makes else inside for name, inside in value.items()}
