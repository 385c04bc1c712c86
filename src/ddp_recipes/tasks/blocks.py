"""The blocks of a model: those that repeat, and those that patterns name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import nn

from ddp_recipes._compat.torch_ import buffers_of
from ddp_recipes.errors import RequestError, nearest

LISTS = (nn.Sequential, nn.ModuleList)  # whose elements are layers


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward: lists and dicts of modules and of parameters only hold what others use."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def chosen(model: nn.Module, wish: bool | str | Sequence[str], key: str) -> list[str]:
    """Return the names of the blocks that a key chooses: true for those that repeat, or patterns of modules' names.

    Raises:
        RequestError: there are none.
    """
    names = repeated(model) if isinstance(wish, bool) else named(model, wish, key)
    for name in names:
        block = model.get_submodule(name)
        if not is_called(block):
            others = f"its elements: {key}=['{name}.*']" if [*block.children()] else "the module that uses it"
            raise RequestError(
                f"{key}: {name} is a {type(block).__name__}, which is never called itself. Name {others}."
            )
    if not names:
        kind, there = type(model).__name__, ", ".join(name for name, _ in model.named_children())
        lists = f"{key}=true takes the elements of nn.Sequential and nn.ModuleList, and {kind} has none with parameters"
        why = lists if isinstance(wish, bool) else f"{key}={wish!s} names no block"
        raise RequestError(f"{why}. Name its blocks: {there or 'it has no modules in it'}.")
    return names


def repeated(model: nn.Module) -> list[str]:
    """Return the names of the elements, with parameters, of the outermost lists of blocks; of lists in them likewise.

    A list that is never called is no block, but its elements are.
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, LISTS)]
    outermost = [name for name in lists if not any(_is_in(name, other) for other in lists)]
    return [block for name in outermost for block in _elements(model, name)]


def _elements(model: nn.Module, name: str) -> Iterator[str]:
    for child, block in model.get_submodule(name).named_children():
        inside = f"{name}.{child}" if name else child
        if not is_called(block):
            yield from _elements(model, inside)
        elif next(block.parameters(), None) is not None:
            yield inside


def named(model: nn.Module, patterns: str | Sequence[str], key: str) -> list[str]:
    """Return the names of the modules that patterns match, without those inside of others.

    Raises:
        RequestError: a pattern matches nothing; the nearest names are offered.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = matched(patterns, names, key, "module")
    return [name for name in found if not any(_is_in(name, other) for other in found)]


def _is_in(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def matched(patterns: str | Sequence[str], names: Sequence[str], key: str, kind: str = "parameter") -> list[str]:
    """Return the names that a pattern matches, as a shell's does (``*`` is also for dots), or that lie in a module.

    Args:
        kind: of what the names are, for messages.

    Raises:
        RequestError: a pattern matches nothing; the nearest names are offered.
    """
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        mine = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not mine:
            parts = [name.rsplit(".", dots)[0] for name in names for dots in range(name.count(".") + 1)]
            raise RequestError(
                f"{key}: {pattern} matches no {kind}. It is matched with whole names, as a shell's patterns are, "
                f"and a module's name means all in it.{nearest(pattern, dict.fromkeys(parts))} The first names: "
                f"{', '.join(names[:4])}."
            )
        found |= dict.fromkeys(mine)
    return list(found)


@contextmanager
def on_copies(block: nn.Module) -> Iterator[None]:
    """Let a block move copies of its buffers, in a pass that does not count."""
    places = [(buffers_of(module), name) for module in block.modules() for name in buffers_of(module)]
    kept = [owner[name] for owner, name in places]
    for (owner, name), buffer in zip(places, kept, strict=True):
        owner[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for (owner, name), buffer in zip(places, kept, strict=True):
            owner[name] = buffer
