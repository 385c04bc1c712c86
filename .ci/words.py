"""Find words of our own where the field has one: by the tables of words.md, in names of the code and in prose.

``python .ci/words.py`` fails where a word comes back that is gone (0 in the table), and warns where another number has
changed; ``--all`` shows every place, ``--count`` prints the tables' numbers anew.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / ".ci" / "words.md"
ROW = re.compile(r"^\| `(=?)([^`]+)` \| (\d+) \| (.+) \|$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True)
class Word:
    """A row of a table.

    Attributes:
        whole: whether it has to be the whole of a name.
        today: how often it is there.
        say: the word to take in its place.
    """

    text: str
    whole: bool
    today: int
    say: str


def tables() -> tuple[list[Word], list[Word]]:
    """Return the words of names, and those of prose."""
    names, _, prose = TABLES.read_text(encoding="utf-8").partition("\n## Prose\n")
    return tuple([Word(r[2], bool(r[1]), int(r[3]), r[4]) for r in ROW.finditer(text)] for text in (names, prose))


def files(*patterns: str) -> list[Path]:
    """Return the files of the repository that git knows, by pattern."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines, in snake case, each with its line."""
    yield 1, path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name = node.name
            case ast.arg():
                name = node.arg
            case ast.Name(ctx=ast.Store()):
                name = node.id
            case ast.Attribute(ctx=ast.Store()):
                name = node.attr
            case _:
                continue
        yield node.lineno, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page without its code, or of a module's docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
        yield from enumerate((CODE.sub("", line) for line in text.splitlines()), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for number, line in enumerate((ast.get_docstring(node) or "").splitlines(), node.body[0].lineno):
                yield number, CODE.sub("", line)
    for number, line in enumerate(text.splitlines(), 1):
        if comment := re.search(r"(?:^|  )# (.*)", line):
            yield number, comment[1]


def places(word: Word, found: list[tuple[str, str]], of_names: bool) -> list[str]:
    """Return where a word is used."""
    if not of_names:
        pattern = re.compile(rf"\b{re.escape(word.text)}\b", re.IGNORECASE)
        return [place for place, line in found if pattern.search(line)]
    return [place for place, name in found if name == word.text or (not word.whole and f"_{word.text}_" in f"_{name}_")]


def main() -> int:
    """Print what has changed; return 1 where a word that is gone has come back."""
    of_names, of_prose = tables()
    modules = files("src/*.py", ":!src/ddp_recipes/template")
    pages = files("docs/*.md", "benchmarks/*.md", "README.md", "CONTRIBUTING.md", ":!benchmarks/results")
    defined = [(f"{path.relative_to(ROOT)}:{line}", name) for path in modules for line, name in names(path)]
    written = [(f"{path.relative_to(ROOT)}:{line}", text) for path in [*modules, *pages] for line, text in prose(path)]
    status, everything = 0, "--all" in sys.argv
    for words, found, kind in ((of_names, defined, "names"), (of_prose, written, "lines")):
        for word in words:
            at = places(word, found, kind == "names")
            if "--count" in sys.argv:
                print(f"| `{'=' if word.whole else ''}{word.text}` | {len(at)} | {word.say} |")
            elif everything or len(at) != word.today:
                gone = len(at) > word.today == 0
                status |= gone
                shown = ", ".join(at if everything or gone else at[:3])
                print(
                    f"{'error' if gone else 'note'}: {word.text} in {len(at)} {kind}, {word.today} in words.md; "
                    f"say {word.say}. {shown}"
                )
    return status


if __name__ == "__main__":
    sys.exit(main())
