"""The tables of a campaign, and the file from which each of its runs can be repeated and the campaign can go on."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.campaign import replacing
from benchmarks.campaign.judge import Verdict
from benchmarks.campaign.script import KINDS, MODES, Script
from benchmarks.campaign.seen import Played
from benchmarks.results import machine

Record = dict[str, Any]
SEEN = {
    "writing_parts": "faults while a rank wrote its part",
    "noted": "faults when parts were there, and no index",
    "saving": "faults while rank 0 wrote the checkpoint, or its index",
    "pruning": "faults while parts were deleted",
}


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

    def record(self) -> Record:
        """Return everything that goes into the file."""
        done = [{**asdict(done), "fault": str(done.fault), "at": None, "pid": None} for done in self.played.done]
        starts = [{**asdict(started), "text": None} for started in self.played.starts]
        return {
            "script": as_json(self.script),
            "commit": machine("cpu")["commit"],
            "done": [_short(one) for one in done],
            "starts": [_short(one) for one in starts],
            "verdict": _short(asdict(self.verdict)),
            "seconds": round(self.seconds, 1),
        }


def as_json(script: Script) -> Record:
    """Return a script as the file has it."""
    found: Record = json.loads(json.dumps(asdict(script)))
    return found


def line(run: Record) -> str:
    """Return a run in a line."""
    script, verdict = run["script"], run["verdict"]
    done = ", ".join(done["fault"] for done in run["done"]) or "nothing"
    sizes = " ".join(str(started["world_size"]) for started in run["starts"])
    lost = ", ".join(map(str, verdict["lost"])) or "0"
    if costs := verdict.get("costs_s"):
        lost += f"; each rank replaced in {', '.join(f'{seconds:g}' for seconds in costs)} s"
    words = "; ".join(verdict["flaws"]) or "as promised"
    return (
        f"{script['mode']} {script['number']:3}  {script['recipe']:8}  {done}  "
        f"(ranks {sizes}; lost {lost}; {run['seconds']:.0f} s): {words}"
    )


def markdown(runs: Sequence[Record], command: str) -> str:
    """Return the tables as a page."""
    here = machine("cpu")
    commits = list(dict.fromkeys(run["commit"] for run in runs))
    parts = [
        "# Faults: what came of a campaign",
        f"`{command}`, {here['date']}, commit {', '.join(commits)}, on {here['cores']} cores of {here['processor']} "
        f"with {here['memory_gb']} GB, {here['system']}, Python {here['python']}, torch {here['torch']}. "
        f"[What is counted](../README.md#the-fault-campaign).",
        _table(_runs(runs)),
        _table(_kinds(runs)),
    ]
    if costs := [seconds for run in runs for seconds in run["verdict"].get("costs_s", [])]:
        parts.append(_table(replacing.histogram(costs)))
    flawed = [f"- {line(run)}" for run in runs if run["verdict"]["flaws"]]
    if flawed:
        parts += ["## Not as promised", "\n".join(flawed)]
    return "\n\n".join(parts) + "\n"


def _runs(runs: Sequence[Record]) -> list[list[str]]:
    """Return a column for each mode."""
    chosen = {mode: [run for run in runs if run["script"]["mode"] == mode] for mode in MODES}
    chosen = {mode: found for mode, found in chosen.items() if found}
    verdicts = {mode: [run["verdict"] for run in found] for mode, found in chosen.items()}
    rows = [["", *chosen]]

    def count(name: str, of: Callable[[Record], int], among: Mapping[Any, Sequence[Record]]) -> None:
        rows.append([name, *(str(sum(map(of, found))) for found in among.values())])

    def share(name: str, part: str, whole: str) -> None:
        sums = [[sum(each[key] for each in found) for key in (part, whole)] for found in verdicts.values()]
        rows.append([name, *(f"{right} of {all_of}" for right, all_of in sums)])

    count("runs", lambda run: 1, chosen)
    count("faults done", lambda run: len(run["done"]), chosen)
    count("starts", lambda run: len(run["starts"]), chosen)
    for seen, words in SEEN.items():
        if any(_of_save(seen, run) for run in runs):
            count(words, partial(_of_save, seen), chosen)
    count("finished unaided", lambda verdict: verdict["finished"], verdicts)
    count("bit-identical to the undisturbed run of one process", lambda verdict: verdict["identical"], verdicts)
    count("TensorBoard points twice", lambda verdict: verdict["twice"], verdicts)
    count("points missing or too many", lambda verdict: verdict["missing"], verdicts)
    count("points with another value", lambda verdict: verdict["differing"], verdicts)
    most = [max((lost for each in found for lost in each["lost"]), default=0) for found in verdicts.values()]
    rows.append(["most steps lost at once", *map(str, most)])
    count("resumes that lost more than they may", _too_much, verdicts)
    count("processes left", lambda verdict: verdict["orphans"], verdicts)
    count(
        "files of checkpoints in parts that are neither JSON nor safetensors",
        lambda each: each.get("pickled", 0),
        verdicts,
    )
    share("true causes named", "named", "asked")
    share("exit statuses right", "statuses_right", "statuses")
    count("runs with all of it as promised", lambda verdict: not verdict["flaws"], verdicts)
    medians = [statistics.median(run["seconds"] for run in found) for found in chosen.values()]
    rows.append(["time a run, median", *(f"{median:.0f} s" for median in medians)])
    return rows


def _of_save(seen: str, run: Record) -> int:
    return sum(done.get("seen") == seen for done in run["done"])


def _too_much(verdict: Record) -> int:
    return sum(lost > allowed for lost, allowed in zip(verdict["lost"], verdict["allowed"], strict=True))


def _kinds(runs: Sequence[Record]) -> list[list[str]]:
    """Return a row for each kind of fault: how often it was done, and how long a run took to be gone after it."""
    modes = [mode for mode in MODES if any(run["script"]["mode"] == mode for run in runs)]
    rows = [["fault", "done", *(f"gone after, {mode}: median, most" for mode in modes)]]
    for name, kind in KINDS.items():
        times = []
        for mode in modes:
            seconds = [
                seconds
                for run in runs
                if run["script"]["mode"] == mode
                for what, seconds in run["verdict"]["gone_s"]
                if what == name
            ]
            times.append(f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} s" if seconds else "")
        done = sum(done["fault"].split()[0] == name for run in runs for done in run["done"])
        rows.append([kind.text, str(done), *times])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rest])


def write(path: Path, runs: Sequence[Record], command: str) -> None:
    """Write everything as JSON, a line for each run: its script, what was done, how each start ended, the verdict.

    The tables are written beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"command": command, "machine": machine("cpu")}
    body = ",\n  ".join(map(json.dumps, runs))
    path.write_text(f'{json.dumps(head)[:-1]},\n "runs": [\n  {body}\n ]}}\n', encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(runs, command), encoding="utf-8")


def read(path: Path | None) -> list[Record]:
    """Return the runs that a file has; none if there is no file."""
    if path is None or not path.exists():
        return []
    campaign = json.loads(path.read_text(encoding="utf-8"))
    return [{"commit": campaign["machine"]["commit"], **run} for run in campaign["runs"]]


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """Return what is there, in three decimals."""
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in values.items()
        if value is not None
    }
