"""What tests take, from pytest's junit files: ``python benchmarks/durations.py quick.xml all.xml > …/tests.md``.

``make test ARGS=--junitxml=quick.xml`` writes such a file.
"""

import platform
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """The tests of one command.

    Attributes:
        seconds: from the first test to the last, by the clock.
        durations: seconds and name of each test, the longest first; its fixtures included.
        skipped: how many were skipped.
        failed: how many failed.
    """

    command: str
    seconds: float
    durations: Sequence[tuple[float, str]]
    skipped: int
    failed: int

    @classmethod
    def read(cls, command: str, path: Path) -> "Suite":
        """Return what a junit file says."""
        (suite,) = ET.parse(path).getroot().iter("testsuite")
        cases = [(float(case.get("time", 0)), _name(case)) for case in suite.iter("testcase")]
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        return cls(command, float(suite.get("time", 0)), sorted(cases, reverse=True), skipped, failed)


def _name(case: ET.Element) -> str:
    file = case.get("classname", "").removeprefix("tests.").replace(".", "/")  # empty where a whole module is skipped
    return f"{file}::{case.get('name')}"


def table(rows: Iterable[tuple[float, str]]) -> str:
    """Return durations as a table of markdown."""
    lines = [f"| {seconds:.1f} | `{name.replace('|', '/')}` |" for seconds, name in rows]
    return "\n".join(["| s | test |", "| --- | --- |", *lines])


def main(quick: Path, everything: Path) -> None:
    """Print the page."""
    suites = [Suite.read("make test", quick), Suite.read("make test-all", everything)]
    print("# What the tests take\n")
    print(
        f"`benchmarks/durations.py`, two cores, Python {platform.python_version()}, torch {version('torch')}.\n"
        "Seconds by the clock, beside the tests of two other workers: about half as much again as a test takes alone.\n"
    )
    print("| | tests | skipped | failed | minutes |\n| --- | --- | --- | --- | --- |")
    for suite in suites:
        counts = f"{len(suite.durations)} | {suite.skipped} | {suite.failed} | {suite.seconds / 60:.1f}"
        print(f"| `{suite.command}` | {counts} |")
    for suite in suites:
        print(f"\n## The longest of `{suite.command}`\n\n{table(suite.durations[:50])}")
    over = [row for row in suites[0].durations if row[0] > 1]
    print(f"\n## Quick tests of more than a second\n\n{table(over)}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
