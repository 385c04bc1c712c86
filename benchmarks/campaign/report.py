"""The tables of a campaign, and the file from which each of its runs can be repeated."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.campaign.judge import Verdict
from benchmarks.campaign.script import KINDS, MODES, Script
from benchmarks.campaign.seen import Played
from benchmarks.results import machine


@dataclass
class Entry:
    """A run and what came of it."""

    script: Script
    played: Played
    verdict: Verdict
    seconds: float

    @property
    def perfect(self) -> bool:
        """Whether all was as promised."""
        return not self.verdict.flaws

    def line(self) -> str:
        """Return the run in a line, and a line for each flaw."""
        script, verdict = self.script, self.verdict
        done = ", ".join(str(done.fault) for done in self.played.done) or "nothing"
        sizes = " ".join(str(started.world_size) for started in self.played.starts)
        lost = ", ".join(map(str, verdict.lost)) or "0"
        words = "as promised" if self.perfect else "; ".join(verdict.flaws)
        return (
            f"{script.mode} {script.number:3}  {script.recipe:8}  {done}  "
            f"(ranks {sizes}; lost {lost}; {self.seconds:.0f} s): {words}"
        )


def markdown(entries: Sequence[Entry], command: str) -> str:
    """Return the tables as a page."""
    here = machine("cpu")
    parts = [
        "# Faults: what came of a campaign",
        f"`{command}`, {here['date']}, commit {here['commit']}, on {here['cores']} cores of {here['processor']} with "
        f"{here['memory_gb']} GB, {here['system']}, Python {here['python']}, torch {here['torch']}. "
        f"[What is counted](../README.md#the-fault-campaign).",
        _table(_runs(entries)),
        _table(_kinds(entries)),
    ]
    flawed = [f"- {entry.line()}" for entry in entries if not entry.perfect]
    if flawed:
        parts += ["## Not as promised", "\n".join(flawed)]
    return "\n\n".join(parts) + "\n"


def _runs(entries: Sequence[Entry]) -> list[list[str]]:
    """Return a column for each mode."""
    modes = [mode for mode in MODES if any(entry.script.mode == mode for entry in entries)]
    rows = [["", *modes]]
    chosen = {mode: [entry for entry in entries if entry.script.mode == mode] for mode in modes}

    def row(name: str, *values: str) -> None:
        rows.append([name, *values])

    def count(name: str, condition: Any) -> None:
        row(name, *(str(sum(map(condition, chosen[mode]))) for mode in modes))

    count("runs", lambda entry: True)
    count("faults done", lambda entry: len(entry.played.done))
    count("starts", lambda entry: len(entry.played.starts))
    count("finished unaided", lambda entry: entry.verdict.finished)
    count("bit-identical to the undisturbed run of one process", lambda entry: entry.verdict.identical)
    count("TensorBoard points twice", lambda entry: entry.verdict.twice)
    count("points missing or too many", lambda entry: entry.verdict.missing)
    count("points with another value", lambda entry: entry.verdict.differing)
    most = {mode: max((lost for entry in chosen[mode] for lost in entry.verdict.lost), default=0) for mode in modes}
    row("most steps lost at once", *(str(most[mode]) for mode in modes))
    count("resumes that lost more than they may", lambda entry: _too_much(entry.verdict))
    count("processes left", lambda entry: entry.verdict.orphans)
    for name, part, of in (
        ("true causes named", "named", "asked"),
        ("exit statuses right", "statuses_right", "statuses"),
    ):
        values = []
        for mode in modes:
            right, all_of = (sum(getattr(entry.verdict, key) for entry in chosen[mode]) for key in (part, of))
            values.append(f"{right} of {all_of}")
        row(name, *values)
    count("runs with all of it as promised", lambda entry: entry.perfect)
    row(
        "time a run, median", *(f"{statistics.median(entry.seconds for entry in chosen[mode]):.0f} s" for mode in modes)
    )
    return rows


def _too_much(verdict: Verdict) -> int:
    return sum(lost > allowed for lost, allowed in zip(verdict.lost, verdict.allowed, strict=True))


def _kinds(entries: Sequence[Entry]) -> list[list[str]]:
    """Return a row for each kind of fault: how often it was done, and how long a run took to be gone after it."""
    modes = [mode for mode in MODES if any(entry.script.mode == mode for entry in entries)]
    rows = [["fault", "done", *(f"gone after, {mode}: median, most" for mode in modes)]]
    for name, kind in KINDS.items():
        times = []
        for mode in modes:
            seconds = [
                seconds
                for entry in entries
                if entry.script.mode == mode
                for what, seconds in entry.verdict.gone_s
                if what == name
            ]
            times.append(f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "")
        done = sum(done.fault.kind == name for entry in entries for done in entry.played.done)
        rows.append([kind.text, str(done), *times])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rest])


def record(entries: Sequence[Entry], command: str) -> str:
    """Return everything as JSON, a line for each run: its script, what was done, how each start ended, the verdict."""
    head = {"command": command, "machine": machine("cpu")}
    lines = [json.dumps(_entry(entry)) for entry in entries]
    body = ",\n  ".join(lines)
    return f'{json.dumps(head)[:-1]},\n "runs": [\n  {body}\n ]}}\n'


def _entry(entry: Entry) -> dict[str, Any]:
    done = [{**asdict(done), "fault": str(done.fault), "at": None, "pid": None} for done in entry.played.done]
    starts = [{**asdict(started), "text": None} for started in entry.played.starts]
    return {
        "script": asdict(entry.script),
        "done": [_short(one) for one in done],
        "starts": [_short(one) for one in starts],
        "verdict": _short(asdict(entry.verdict)),
        "seconds": round(entry.seconds, 1),
    }


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """Return what is there, in three decimals."""
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in values.items()
        if value is not None
    }
