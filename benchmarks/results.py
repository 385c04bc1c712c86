"""What a benchmark leaves: rows with goal, figure and verdict, raw turns, and the machine they were taken on."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.samples import ROOT
from benchmarks.turns import Session, Spread

PACKAGES = {"torch": "torch", "lightning": "Lightning", "accelerate": "Accelerate", "torchft": "torchft"}
OFF = 1.5  # times its goal: what "off by more than half" means


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        quick: few rounds of what matters most, for CI.
        sessions: how often everything is started afresh; figures are medians over sessions.
        peers: whether Lightning, Fabric and Accelerate take part where they are installed.
    """

    quick: bool = False
    ranks: tuple[int, ...] = (1, 2)
    sessions: int = 5
    device: str = "cpu"
    peers: bool = True


@dataclass(frozen=True)
class Row:
    """A figure, and its goal if it has one: smaller is better.

    Attributes:
        title: what is measured; rows of one title belong together.
        name: of whom.
        unit: empty for a ratio.
    """

    title: str
    name: str
    figure: Spread
    goal: float | None = None
    unit: str = ""

    @property
    def what(self) -> str:
        """Title and name."""
        return f"{self.title}: {self.name}" if self.name else self.title

    @property
    def verdict(self) -> str:
        """How it compares with its goal."""
        if self.goal is None:
            return ""
        if self.figure.median <= self.goal:
            return "met"
        return "missed by more than half" if self.figure.median > OFF * self.goal else "missed"

    @property
    def fails(self) -> bool:
        """Whether a quick run fails for it: a ratio off its goal by more than half."""
        return not self.unit and self.verdict == "missed by more than half"

    def cells(self) -> tuple[str, ...]:
        """Return what a table shows of it."""
        unit = f" {self.unit}" if self.unit else ""
        goal = "" if self.goal is None else f"≤ {self.goal:g}{unit}"
        spread = self.figure
        return (
            self.what,
            goal,
            f"{number(spread.median)}{unit}",
            f"{number(spread.low)}–{number(spread.high)}",
            self.verdict,
        )


def row_of(plain: Mapping[str, Any]) -> Row:
    """Return a row of a results file."""
    return Row(plain["title"], plain["name"], Spread(**plain["figure"]), plain["goal"], plain["unit"])


@dataclass(frozen=True)
class Group:
    """What one part of the benchmark gives: rows, and every turn for who wants to look."""

    rows: Sequence[Row]
    raw: Mapping[str, Any]


def in_ranks(ranks: int) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def number(value: float) -> str:
    """Return a number as a table shows it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 100 else f"{value:.3f}"


def table(rows: Sequence[Row]) -> str:
    """Return rows under a heading, in columns."""
    lines = [("what", "goal", "figure", "spread", "verdict"), *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[4]]).rstrip()
        for line in lines
    )


def raw_turns(sessions: Sequence[Session]) -> dict[str, Any]:
    """Return the seconds of every turn by competitor, session and round, and each one's last loss."""
    return {
        name: {
            "steps": sessions[0][name][0].steps,
            "seconds": [[round(turn.seconds, 6) for turn in session[name]] for session in sessions],
            "loss": [session[name][-1].level for session in sessions],
        }
        for name in sessions[0]
    }


def write(path: Path, name: str, group: Group, settings: Settings) -> None:
    """Put a group into the results file; other groups in it stay, each with its own date."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[name] = {
        "rows": [asdict(row) | {"verdict": row.verdict} for row in group.rows],
        "settings": asdict(settings),
        "machine": machine(settings.device),
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "raw": group.raw,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(results, ensure_ascii=False) + "\n", encoding="utf-8")
    aside.replace(path)


def page(path: Path, heading: str) -> dict[str, Any]:
    """Write a results file as tables, to be read; return what is in it."""
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"# {heading}", ""]
    for name, group in results.items():
        there, rows = group["machine"], [row_of(each) for each in group["rows"]]
        packages = [f"{package} {there[each]}" for each, package in PACKAGES.items() if there.get(each)]
        lines += [f"## {name.capitalize()}", ""]
        lines += [f"`{group['command']}`, {there['date']}, commit {there['commit']}, {', '.join(packages)}, "]
        lines[-1] += f"{there['cores']} cores."
        lines += ["", "| what | figure | spread | goal | |", "| --- | ---: | ---: | ---: | --- |"]
        for what, goal, figure, spread, verdict in (row.cells() for row in rows):
            lines.append(f"| {what} | {figure} | {spread} | {goal} | {verdict} |")
        lines.append("")
        lines += [f"Left out: {each}: {why}.\n" for each, why in group["raw"].get("left out", {}).items()]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    return results


def machine(device: str) -> dict[str, Any]:
    """Describe this machine, what was run on it, and when."""
    described: dict[str, Any] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in PACKAGES:
        try:
            described[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            described[package] = None
    if device == "cuda":
        import torch

        described["gpu"] = torch.cuda.get_device_name()
    return described


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def commit() -> str:
    """Return the commit that was measured, with a ``+`` if it has been changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "conf", "train.py")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
