"""How much of what goes wrong do the tests find? Change the code at random places, one at a time, and see who notices.

Run it in a clone of its own, with an environment of its own: it changes files there, and puts them back.

    python benchmarks/mutations.py choose --seed 26 --count 30 --sites sites.json
    python benchmarks/mutations.py reach --sites sites.json --marks "not nightly"
    python benchmarks/mutations.py play --sites sites.json --marks "not slow and not nightly"

`choose` draws lines of the package, and of each line one change: a sign, a bound, `and` for `or`, a number that is one
more, a call that is missing. `reach` runs the tests once, with each place noting which tests come by, and `play` runs
those of them that have the marks on each change, the quickest first, until one fails. A change that no test fails on is
printed as it is, for a person to say whether it changes anything. Places are known by the text of their line, so that
the same ones can be played on another commit.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ddp_recipes"
PROBE = SOURCE / "reached.py"
PROBE_TEXT = """\
import os

SEEN = set()


def reach(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in SEEN:
        SEEN.add((number, test))
        with open(os.path.join({folder!r}, str(number)), "a") as file:
            file.write(test + "\\n")
"""
OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Add: ast.Sub,
    ast.Mult: ast.Add,
    ast.And: ast.Or,
}
OPPOSITE |= {new: old for old, new in OPPOSITE.items() if old is not ast.Mult}
LONGEST_S = 900  # for the tests of one change: those that wait for ever have noticed


@dataclass
class Site:
    """A place in the code and its change.

    Attributes:
        line: the text of the line in which the place begins.
        number: which of the lines with that text, from 0.
        column: of the place in that line.
        before, after: its text, and what it is changed to.
        tests: the ids of the tests that come by.
    """

    path: str
    line: str
    number: int
    column: int
    before: str
    after: str
    tests: list[str] = field(default_factory=list)

    def put(self, text: str, root: Path = ROOT) -> bool:
        """Write the file with another text in this place; return whether there is such a place."""
        file = root / self.path
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        starts = [at for at, line in enumerate(lines) if line.rstrip("\n") == self.line]
        if len(starts) <= self.number:
            return False
        head, rest = "".join(lines[: starts[self.number]]), "".join(lines[starts[self.number] :])
        if not rest[self.column :].startswith(self.before):
            return False
        file.write_text(head + rest[: self.column] + text + rest[self.column + len(self.before) :])
        return True


# --- choosing --------------------------------------------------------------------------------------------------------


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node may be changed to."""
    match node:
        case ast.Compare(ops=[operation]) if type(operation) in OPPOSITE:
            yield ast.Compare(node.left, [OPPOSITE[type(operation)]()], node.comparators)  # type: ignore[list-item]
        case ast.BinOp(op=operation) if type(operation) in OPPOSITE:
            yield ast.BinOp(node.left, OPPOSITE[type(operation)](), node.right)  # type: ignore[arg-type]
        case ast.BoolOp(op=operation):
            yield ast.BoolOp(OPPOSITE[type(operation)](), node.values)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield ast.Constant(value + 1)
        case ast.Expr(value=ast.Call()):
            yield ast.Constant(None)


def inner(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is in it, but for annotations, patterns and texts."""
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "pattern", "ops", "op") and not isinstance(node, ast.JoinedStr):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from inner(each)


def sites_of(path: Path) -> Iterator[Site]:
    """Yield all changes of a file."""
    text = path.read_text()
    lines = text.splitlines()
    for node in inner(ast.parse(text)):
        for change in changed(node):
            assert isinstance(node, (ast.expr, ast.stmt))
            line, at = lines[node.lineno - 1], node.lineno - 1
            column = len(line.encode()[: node.col_offset].decode())
            before = ast.get_source_segment(text, node)
            assert before is not None
            after = f"({ast.unparse(ast.fix_missing_locations(change))})"
            yield Site(str(path.relative_to(ROOT)), line, lines[:at].count(line), column, before, after)


def choose(seed: int, count: int) -> list[Site]:
    """Draw lines of the package, and a change of each."""
    files = [path for path in sorted(SOURCE.rglob("*.py")) if not {"conf", "template"} & {*path.parts}]
    by_line: dict[tuple[str, str, int], list[Site]] = {}
    for path in files:
        for site in sites_of(path):
            by_line.setdefault((site.path, site.line, site.number), []).append(site)
    draw = random.Random(seed)
    return [draw.choice(by_line[line]) for line in draw.sample(sorted(by_line), count)]


# --- playing ---------------------------------------------------------------------------------------------------------


@contextmanager
def as_it_was() -> Iterator[None]:
    """Put the package back afterwards.

    Raises:
        SystemExit: it has changes of its own.
    """
    if subprocess.run(["git", "status", "--porcelain", "src"], cwd=ROOT, capture_output=True, check=True).stdout:
        sys.exit(f"{SOURCE} has changes that are not committed. Give this program a clone of its own.")
    try:
        yield
    finally:
        PROBE.unlink(missing_ok=True)
        subprocess.run(["git", "checkout", "--quiet", "src"], cwd=ROOT, check=True)


def pytest(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, **options)


def reach(sites: Sequence[Site], marks: str, folder: Path) -> None:
    """Run the tests, and write to each place which of them come by."""
    folder.mkdir(parents=True)
    with as_it_was():
        PROBE.write_text(PROBE_TEXT.format(folder=str(folder.absolute())))
        for number, site in enumerate(sites):
            probe = f'__import__("ddp_recipes.reached", fromlist=["reach"]).reach({number})'
            site.put(f"({probe} or ({site.before}))")
        workers = ["--numprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
        pytest("-m", marks, *workers, f"--junitxml={folder / 'junit.xml'}")
    seconds = {}
    for case in ET.parse(folder / "junit.xml").getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    for number, site in enumerate(sites):
        if (folder / str(number)).is_file():
            found = {*(folder / str(number)).read_text().splitlines()} - {""}
            site.tests = sorted(found, key=lambda test: seconds.get(test, 0.0))


def play(sites: Sequence[Site], marks: str) -> list[str]:
    """Return what became of each change: the test that fails, ``time``, ``nobody``, or ``no place`` on this commit."""
    listed = pytest("-m", marks, "--collect-only", capture_output=True).stdout.splitlines()
    ends = []
    for number, site in enumerate(sites):
        with as_it_was():
            tests = [test for test in site.tests if test in {*listed}]
            ends.append(end_of(tests) if site.put(site.after) else "no place")
        print(f"{number:3} {ends[-1]}  ({len(tests)} tests)\n    {site.path}: {site.line.strip()}", flush=True)
        print(f"    {' '.join(site.before.split())}  ->  {site.after}", flush=True)
    return ends


def end_of(tests: Sequence[str]) -> str:
    """Run tests on a change until one fails, a few at first."""
    few = 24
    for part in (tests[:few], tests[few:]):
        if part:
            try:
                done = pytest("-x", "-n", "4", *part, capture_output=True, timeout=LONGEST_S)
            except subprocess.TimeoutExpired:
                return "time"
            if done.returncode:
                found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return found[1] if found else f"exit status {done.returncode}"
    return "nobody"


def main() -> None:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["choose", "reach", "play"])
    parser.add_argument("--sites", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--marks", default="not nightly")
    asked = parser.parse_args()
    os.environ.pop("PYTEST_ADDOPTS", None)
    if asked.what == "choose":
        sites = choose(asked.seed, asked.count)
    else:
        sites = [Site(**each) for each in json.loads(asked.sites.read_text())]
    if asked.what == "reach":
        reach(sites, asked.marks, asked.sites.with_suffix(".reached").absolute())
    if asked.what == "play":
        ends = play(sites, asked.marks)
        noticed = sum(end not in ("nobody", "no place") for end in ends)
        print(f"{noticed} of {len(ends) - ends.count('no place')} changes are noticed by tests that are {asked.marks}")
    else:
        asked.sites.write_text(json.dumps([asdict(site) for site in sites], indent=1))


if __name__ == "__main__":
    main()
