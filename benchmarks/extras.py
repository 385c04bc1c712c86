"""Which part of the package a module is of: the core, or one of the extras that ``.ci/extras.toml`` lists."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ddp_recipes"
TABLE = ROOT / ".ci" / "extras.toml"
CORE = "core"


@dataclass(frozen=True)
class Extra:
    """An entry of the table, which says what each field means."""

    modules: tuple[str, ...]
    files: tuple[str, ...]
    names: str
    on: tuple[str, ...]

    def paths(self, root: Path) -> Iterator[Path]:
        """Yield the files and folders of an extra that are there."""
        for name in self.modules:
            path = root.joinpath("src", PACKAGE, *name.split("."))
            yield from (each for each in (path, path.with_suffix(".py")) if each.exists())
        for pattern in self.files:
            yield from root.glob(pattern)


@cache
def extras() -> dict[str, Extra]:
    """Return all extras, by name."""
    entries = tomllib.loads(TABLE.read_text(encoding="utf-8"))["extras"]
    return {
        name: Extra(tuple(entry["modules"]), tuple(entry["files"]), entry["names"], tuple(entry.get("on", ())))
        for name, entry in entries.items()
    }


@cache
def parts() -> dict[str, tuple[str, ...]]:
    """Return what the count shows rows of besides the core: extras, and parts of the core; by the names of modules."""
    others = tomllib.loads(TABLE.read_text(encoding="utf-8"))["parts"]
    return {name: extra.modules for name, extra in extras().items()} | {name: tuple(x) for name, x in others.items()}


def part_of(module: str) -> str:
    """Return what a module is of: the name of an extra or another part, or ``core``."""
    found = [
        (len(prefix), name)
        for name, prefixes in parts().items()
        for prefix in prefixes
        if f"{module}.".startswith(f"{PACKAGE}.{prefix}.")
    ]
    return max(found)[1] if found else CORE


def based_on(name: str) -> set[str]:
    """Return an extra and those that it is built on, directly or not."""
    return {name}.union(*map(based_on, extras()[name].on))


def going_with(name: str) -> list[str]:
    """Return what goes where an extra goes: itself and those that are built on it."""
    return [name, *(other for other in extras() if other != name and name in based_on(other))]
