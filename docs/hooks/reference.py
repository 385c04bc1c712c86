"""The generated pages of the reference: every config key from yaml files and settings classes, and the public API."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ddp_recipes._lazy import published
from ddp_recipes.config.keys import describe, shown
from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.config.settings import (
    CheckpointSettings,
    ClusterSettings,
    DataSettings,
    ModelSettings,
    ResumeSettings,
    RunSettings,
    SweepSettings,
    TrainerSettings,
    launcher_class,
)

CONF = Path(__file__).resolve().parents[2] / "conf"
SECTIONS: dict[str, type] = {
    "": RunSettings,
    "checkpoint": CheckpointSettings,
    "cluster": ClusterSettings,
    "data": DataSettings,
    "model": ModelSettings,
    "resume": ResumeSettings,
    "sweep": SweepSettings,
    "trainer": TrainerSettings,
}
GROUPS = (
    *("trainer", "strategy", "launcher", "checkpoint", "data", "model", "task", "optimizer", "scheduler"),
    *("logger", "callbacks", "experiment", "debug"),
)
SPLITS = ("train", "val", "test", "predict")
ARGUMENT = re.compile(r" +(\w+): (.*)")
ROLE = re.compile(r":\w+:`~?([^`]*)`")
PACKAGES = {
    "ddp_recipes": "What `import ddp_recipes` has",
    "ddp_recipes.tasks": "Tasks",
    "ddp_recipes.strategies": "Strategies",
    "ddp_recipes.launchers": "Launchers",
    "ddp_recipes.loggers": "Loggers",
    "ddp_recipes.callbacks": "Callbacks",
    "ddp_recipes.datasets": "Data sets",
    "ddp_recipes.models": "Models",
    "ddp_recipes.config.settings": "Settings",
}


@dataclass(frozen=True)
class Key:
    """A key of the config.

    Attributes:
        name: dotted, as on the command line.
        allowed: its type and allowed values, in words.
        reader: the class or function that it is read by.
    """

    name: str
    allowed: str
    default: str
    meaning: str
    reader: str


@dataclass(frozen=True)
class Entry:
    """A value of a yaml with the comment beside or above it; values of a nested section are entries of their own."""

    path: tuple[str, ...]
    value: Any
    comment: str


def entries(path: Path) -> list[Entry]:
    """Return what a yaml sets, in its order. A section is an entry where it is empty or names a ``_target_``."""
    text = path.read_text(encoding="utf-8")
    root, lines = yaml.compose(text), text.splitlines()
    return [*_entries(root, lines, ())] if isinstance(root, yaml.MappingNode) else []


def _entries(node: yaml.MappingNode, lines: list[str], above: tuple[str, ...]) -> Iterator[Entry]:
    for key, value in node.value:
        path = (*above, str(key.value))
        if path == ("defaults",):
            continue
        block = isinstance(value, yaml.MappingNode) and not value.flow_style
        mark = key.end_mark if block else value.end_mark
        says = _comment(lines, key.start_mark.line, mark.line, mark.column)
        plain = yaml.safe_load(yaml.serialize(value))
        if not block or "_target_" in plain:
            yield Entry(path, plain, says)
        if block:
            yield from _entries(value, lines, path)


def _comment(lines: list[str], first: int, last: int, column: int) -> str:
    """Return the comment after a value, or the one on the lines above its key; a file's first line is of the file."""
    rest = lines[last][column:].lstrip(" :") if last < len(lines) else ""
    if rest.startswith("#"):
        return rest.lstrip("# ")
    above: list[str] = []
    while first > 1 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
        above.insert(0, lines[first].lstrip(" #"))
    return " ".join(above)


def found(dotted: str) -> Any:
    """Return the object that a dotted name leads to; ``None`` where its package is not installed."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            return functools.reduce(getattr, parts[end:], import_module(".".join(parts[:end])))
        except (ImportError, AttributeError):
            continue
    return None


def hints_of(target: Any) -> dict[str, Any]:
    """Return the types of the fields of a settings class, or of the arguments of another class or function."""
    try:
        if inspect.isclass(target) and not dataclasses.is_dataclass(target):
            target = target.__init__
        return get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def allowed(hint: Any, value: Any) -> str:
    """Return in words what a type allows; without a type, what the value itself is."""
    if hint is None:
        hint = type(value)
    try:
        return describe(hint)
    except (KeyError, TypeError, ValueError, AttributeError):
        return "names and values" if isinstance(value, dict) else "any"


def explained(thing: Any) -> dict[str, str]:
    """Return what the docstring of a class (its bases' included) or function says of its arguments and attributes."""
    says: dict[str, str] = {}
    for each in inspect.getmro(thing)[:-1] if inspect.isclass(thing) else [thing]:
        name = ""
        for line in (inspect.getdoc(each) or "").splitlines():
            indent = len(line) - len(line.lstrip())
            if indent == 4 and (found := ARGUMENT.match(line)):
                name = found[1]
                says.setdefault(name, found[2])
            elif name and indent > 4:
                says[name] = f"{says[name]} {line.strip()}"
            else:
                name = ""
    return {name: ROLE.sub(r"`\1`", text).replace("``", "`") for name, text in says.items()}


def written(value: Any) -> str:
    """Return a default as a yaml has it."""
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{name}: {written(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return "to be given" if value == "???" else shown(value)


def settings_of(group: str, section: dict[str, Any]) -> type | None:
    """Return the settings class that reads the keys of a section, if one does."""
    if group == "launcher":
        return launcher_class({"_target_": section["_target_"]}).settings_class  # type: ignore[no-any-return]
    if group == "strategy":
        return type(strategy_settings({"_target_": section["_target_"]}))
    return SECTIONS.get(group)


def keys_of(group: str, path: Path, base: list[Entry] = []) -> list[Key]:  # noqa: B006 (read alone)
    """Return the keys that an option of a group has, those of the yaml that it builds on included."""
    merged: dict[tuple[str, ...], Entry] = {}
    for entry in [*base, *entries(path)]:
        comment = entry.comment or (merged[entry.path].comment if entry.path in merged else "")
        merged[entry.path] = dataclasses.replace(entry, comment=comment)
    section = {entry.path[0]: entry.value for entry in merged.values() if len(entry.path) == 1}
    settings = settings_of(group, section)
    prefix = f"{group}." if group else ""
    rows = []
    for entry in merged.values():
        if (entry.path == ("_target_",) and group != "model") or entry.path[-1] in ("_partial_", "_target_"):
            continue
        owner, reader = _reader(group, entry, section, settings)
        hint = hints_of(owner).get(entry.path[-1])
        says = entry.comment or _meaning(owner, reader, entry)
        rows.append(Key(prefix + ".".join(entry.path), allowed(hint, entry.value), written(entry.value), says, reader))
    named = {key.name for key in rows}
    if settings is not None and group in ("strategy", "launcher", "trainer", "checkpoint", "cluster", ""):
        says = explained(settings)
        for field in dataclasses.fields(settings):
            if prefix + field.name not in named:
                default = "to be given" if field.default is dataclasses.MISSING else written(field.default)
                hint = hints_of(settings)[field.name]
                rows.append(
                    Key(
                        prefix + field.name,
                        allowed(hint, None),
                        default,
                        says.get(field.name, headline(_dotted(settings))),
                        _dotted(settings),
                    )
                )
    return rows


def _meaning(owner: Any, reader: str, entry: Entry) -> str:
    """Return what is known of a key without a comment: by its reader's docstring, or by its value."""
    if isinstance(entry.value, dict) and entry.value.get("_target_"):
        target = entry.value["_target_"]
        return f"`{target}`: {headline(target)}" if target.startswith("ddp_recipes.") else f"calls `{target}`"
    if text := explained(owner).get(entry.path[-1]):
        return text
    if isinstance(entry.value, str) and entry.value.startswith("${") and ":" not in entry.value:
        return f"follows `{entry.value[2:-1]}`"
    return f"as `{reader}` takes it" if "." in reader and not reader.startswith("ddp_recipes.config.") else ""


def _reader(group: str, entry: Entry, section: dict[str, Any], settings: type | None) -> tuple[Any, str]:
    """Return the object whose field or argument a key is, and its dotted name."""
    name = entry.path[0]
    if settings is not None and name in {field.name for field in dataclasses.fields(settings)}:
        return settings, _dotted(settings)
    if isinstance(section.get(name), dict) and section[name].get("_target_"):
        return found(section[name]["_target_"]), str(section[name]["_target_"])
    if group == "data":
        target = (section.get("train") or {}).get("_target_", "") if isinstance(section.get("train"), dict) else ""
        return found(target) if target else None, target or "the data set, the model"
    target = str(section.get("_target_", ""))
    return found(target) if target else None, target


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def option_keys(group: str, path: Path) -> list[Key]:
    """Return the keys of an option; those that its ``defaults`` bring come first."""
    base: list[Entry] = []
    for default in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("defaults", []):
        other = CONF / "base" / "data.yaml" if default == "/base/data@_here_" else CONF / group / f"{default}.yaml"
        if other.is_file():
            base += entries(other)
    return keys_of(group, path, base)


def top_level() -> list[Key]:
    """Return the keys of the primary config."""
    rows = []
    for entry in entries(CONF / "train.yaml"):
        if entry.path[0] == "hydra":
            continue  # Hydra's own documentation has them
        section = entry.path[0] if len(entry.path) > 1 else ""
        settings, name = SECTIONS.get(section), ".".join(entry.path)
        reader = {"hydra": "Hydra", "optimizer": "ddp_recipes.build.run"}.get(section) or _dotted(settings or type)
        hint = hints_of(settings).get(entry.path[-1]) if settings else None
        rows.append(Key(name, allowed(hint, entry.value), written(entry.value), entry.comment, reader))
    return rows


def header(path: Path) -> str:
    """Return what a yaml says of itself on its first lines."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.lstrip("# "))
    return " ".join(lines)


def table(rows: list[Key]) -> str:
    """Return the rows as one table for each reader, in the order in which the readers come."""
    readers: dict[str, list[Key]] = {}
    for row in rows:
        readers.setdefault(row.reader, []).append(row)
    parts = []
    for reader, keys in readers.items():
        lines = [f"Read by `{reader}`:" if "." in reader else f"Read by {reader}:", ""]
        lines += ["| key | allowed | default | meaning |", "| --- | --- | --- | --- |"]
        for key in keys:
            cells = (f"`{key.name}`", key.allowed, f"`{key.default}`", key.meaning)
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if not text.startswith("`") else text.replace("|", "\\|")


def options(group: str) -> list[Path]:
    """Return the yaml files of a group."""
    return sorted((CONF / group).glob("*.yaml"))


def keys_page() -> str:
    """Return the page of all keys."""
    parts = [
        "---\nsearch:\n  boost: 4\n---\n\n# Config keys\n",
        "Made from `conf/**.yaml` and the classes that check or take the keys. A key's default is that of its yaml; "
        "what a data choice or an experiment sets otherwise stands there.\n",
        "## Without a group\n",
        table(top_level()),
    ]
    for group in GROUPS:
        parts.append(f"## {group}\n")
        if group == "data":
            parts += ["### every data set\n", header(CONF / "base" / "data.yaml") + "\n"]
            parts.append(table(keys_of("data", CONF / "base" / "data.yaml")))
        for path in options(group):
            parts += [f"### {group}={path.stem}\n", header(path) + "\n"]
            if group in ("experiment", "debug"):
                rows = [f"| `{'.'.join(e.path)}` | `{written(e.value)}` |" for e in entries(path)]
                rows = [row for row in rows if "_target_" not in row.split("|")[1]]
                parts.append("\n".join(["| sets | to |", "| --- | --- |", *rows, ""]) if rows else "")
                continue
            rows_of = {"data": _own_data_keys, "launcher": _own_launcher_keys}.get(group, option_keys)
            if rows := rows_of(group, path):
                parts.append(table(rows))
    return "\n".join(parts)


def _own_data_keys(group: str, path: Path) -> list[Key]:
    """Return what a data set has besides, or sets otherwise than, every data set; not what it hands to its splits."""
    own = {entry.path[0] for entry in entries(path)}
    rows = [(key, key.name.split(".")[1:]) for key in option_keys(group, path)]
    return [key for key, at in rows if at[0] in own and (len(at) == 1 or at[0] not in SPLITS)]


def _own_launcher_keys(group: str, path: Path) -> list[Key]:
    """Return what a launcher has besides, or sets otherwise than, ``launcher=auto``."""
    common = (
        {} if path.stem == "auto" else {key.name: key for key in option_keys(group, CONF / "launcher" / "auto.yaml")}
    )
    rows = option_keys(group, path)
    return [row for row in rows if (old := common.get(row.name)) is None or old.default != row.default]


def api_pages() -> dict[str, str]:
    """Return the pages of the public names, by the page's file name."""
    return {f"{name}.md": api_page(name, title) for name, title in PACKAGES.items()}


def api_page(package: str, title: str) -> str:
    """Return a page that mkdocstrings fills with what a package makes public."""
    doc = inspect.getdoc(import_module(package)) or ""
    parts = [f"# {title}\n", f"`{package}`: {doc}\n"]
    elsewhere = {path for other in PACKAGES if other != package for path in public(other).values()}
    for name, path in public(package).items():
        if package == "ddp_recipes" and path in elsewhere:  # a name is described once, by its own package
            parts.append(f"### {name}\n\n[`{path}`][{path}]: {headline(path)}\n")
        else:
            parts.append(f"::: {path}\n")
    return "\n".join(parts)


def public(package: str) -> dict[str, str]:
    """Return the public names of a package, each with the dotted name of what it is of."""
    module = import_module(package)
    names = getattr(module, "__all__", [name for name in vars(module) if name.endswith("Settings")])
    if package != "ddp_recipes":  # and the classes of extras
        names = [*names, *(name for name in published(package) if isinstance(getattr(module, name), type))]
    things = {name: getattr(module, name) for name in names if not name.startswith("__")}
    return {name: f"{thing.__module__}.{thing.__qualname__}" for name, thing in things.items()}


def headline(dotted: str) -> str:
    """Return the first line of a docstring."""
    return ROLE.sub(r"`\1`", (inspect.getdoc(found(dotted)) or "").partition("\n")[0]).replace("``", "`")
