"""Print what is long: modules, functions, and lines of prose. These are hints for who reads on, so nothing fails."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE, FUNCTION, PROSE = 600, 60, 120  # lines, lines, characters
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def files(*patterns: str) -> list[Path]:
    """Return the files of the repository that git knows, by pattern."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def long_code(path: Path) -> Iterator[str]:
    """Yield what is long in a module."""
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
    if (lines := len(text.splitlines())) > MODULE:
        yield f"{name}: {lines} lines, more than {MODULE}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (lines := length(node)) > FUNCTION:
            yield f"{name}:{node.lineno}: {node.name} has {lines} lines, more than {FUNCTION}"


def length(node: ast.stmt) -> int:
    """Return how many lines a statement takes."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def long_prose(path: Path) -> Iterator[str]:
    """Yield the long lines of a page; tables, pictures and blocks of code may be wider."""
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), path.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > PROSE and not line.lstrip().startswith(("|", "![")):
            yield f"{path.relative_to(ROOT)}:{number}: {len(line)} characters, more than {PROSE}"


if __name__ == "__main__":
    found = [hint for path in files("*.py") for hint in long_code(path)]
    found += [hint for path in files("*.md", ":!benchmarks/results") for hint in long_prose(path)]
    for hint in found:
        print(f"warning: {hint}")
