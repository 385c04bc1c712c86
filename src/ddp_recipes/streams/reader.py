"""What every reader of a shard gives, whatever its format: rows, the parts that they lie in, and what may be wrong."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from ddp_recipes.errors import RequestError

Row = dict[str, Any]


class BadShard(Exception):
    """A shard is missing, damaged, or not what its index says."""


class BadRow(Exception):
    """A row of a shard cannot be decoded."""


def needed(module: str) -> Any:
    """Return a module of the extra ``streams``.

    Raises:
        RequestError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise RequestError(
            f"data=stream needs {package}, which is not installed: pip install 'ddp-recipes[streams]'."
        ) from error


class Part(NamedTuple):
    """Rows of a shard that lie in one place.

    Attributes:
        first, end: the numbers of its rows, in the shard.
        row: returns one by its number in the part, undecoded where that may fail for it alone; raises :class:`BadRow`.
    """

    first: int
    end: int
    row: Callable[[int], Row]


def span(ends: Sequence[int], number: int) -> tuple[int, int, int]:
    """Return which of some parts in a row, by where they end, a row lies in, and where that begins and ends."""
    which = bisect_right(ends, number)
    return which, ends[which - 1] if which else 0, ends[which]


def alike(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether columns are the same, whatever who wrote them calls the elements of lists."""
    named = [{name: kind.replace("<element:", "<item:") for name, kind in each.items()} for each in (one, other)]
    return named[0] == named[1]


class Reader(Protocol):
    """An open shard; ``columns`` are names and types of its columns, as far as the file has them."""

    @property
    def columns(self) -> Mapping[str, str]: ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def part(self, number: int) -> Part:
        """Return the rows around one.

        Raises:
            BadShard: they cannot be read.
        """
        ...

    def close(self) -> None: ...
