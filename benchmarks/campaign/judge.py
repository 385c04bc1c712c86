"""Judge what was seen of a run: by what the goal promises, and against the undisturbed run of one process."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.campaign import files, replacing
from benchmarks.campaign.files import Points
from benchmarks.campaign.play import GONE_S
from benchmarks.campaign.script import INSIDE, RECIPES, STEPS, TEXT
from benchmarks.campaign.seen import Done, Played, Started

SIGNALS = {"interrupt": "SIGINT|Ctrl-C|Interrupted", "interrupt_twice": "SIGINT|Ctrl-C|Interrupted"}
SIGNALS |= {"terminate": "SIGTERM", "usr1": "SIGUSR1"}
UNNAMED = ("kill_launcher", "kill_all", "return_node", "stop_agent")  # nobody is left to name it, or nothing to name
LOST_NODE = re.compile(r"Node \d+ \([\d.]+\) was lost\.")
NUMBERS = {"interrupt": 2, "interrupt_twice": 2, "terminate": 15, "usr1": 10}
SAME = ("global_step", "epoch", "samples_seen", "weights_sha256")  # of summary.json
SKIPPED = "skipped_samples"
TIMES = "train/samples_per_second"  # the one tag whose values are not the recipe's
STOPPED_S = 5.0  # after the collective timeout, for a run with a stopped rank to be gone


@dataclass
class Reference:
    """What an undisturbed run of one process left."""

    summary: dict[str, Any]
    points: Points

    @classmethod
    def of(cls, directory: Path) -> "Reference":
        """Read it."""
        return cls(json.loads((directory / "summary.json").read_text()), files.points(directory))


@dataclass
class Verdict:
    """What came of a run. ``flaws`` says in words what is not as promised.

    Attributes:
        twice, missing, differing: points of TensorBoard.
        pickled: files of checkpoints in parts that are neither JSON nor safetensors.
        lost, allowed: steps lost at each resume, and how many might have been.
        named, asked: causes that were named, of those that somebody was left to name.
        statuses_right, statuses: exit statuses that are as promised.
        costs_s: seconds that each replaced rank cost.
        gone_s: for each fault that ended a start, its kind and the seconds until every process was gone.
    """

    finished: bool
    identical: bool
    twice: int = 0
    missing: int = 0
    differing: int = 0
    lost: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)
    named: int = 0
    asked: int = 0
    statuses_right: int = 0
    statuses: int = 0
    orphans: int = 0
    pickled: int = 0
    gone_s: list[tuple[str, float]] = field(default_factory=list)
    costs_s: list[float] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)


def judge(played: Played, directory: Path, reference: Reference, in_parts: bool = False) -> Verdict:  # noqa: C901 - a question after the other, each of one line or two
    """Return what is to be said of a run, whose checkpoints may be ``in_parts``."""
    verdict = Verdict(played.finished, False)
    flaw = verdict.flaws.append
    for number, started in enumerate(played.starts):
        hurt = [done for done in played.done if done.start == number and done.world_size]
        if started.hung:
            flaw(f"start {number} hung")
        if started.status and not hurt:
            flaw(f"start {number} failed by itself: {_last_line(started.text)}")
        verdict.orphans += started.orphans
        if started.orphans:
            flaw(f"start {number} left {started.orphans} processes")
        if hurt:
            _judge_end(hurt[-1], started, played, verdict)
    for done in played.done:
        said = named(done, played)
        if said is not None and (said or not replacing.beside_another(done, played)):
            verdict.asked += 1
            verdict.named += said
            if not said:
                flaw(f"{done.fault} of start {done.start}: not named")
    for lost, allowed in losses(played):
        verdict.lost.append(lost)
        verdict.allowed.append(allowed)
        if lost > allowed:
            flaw(f"{lost} steps lost, {allowed} may be")
    if not played.finished:
        flaw("not finished")
        return verdict
    _judge_outcome(directory, reference, verdict)
    if played.script.goes_on:
        verdict.costs_s = replacing.costs(played)
        summary = json.loads((directory / "summary.json").read_text())
        verdict.flaws += replacing.flaws(played, summary, verdict.lost)
    if in_parts and (found := files.pickled(directory)):
        verdict.pickled = len(found)
        flaw(f"neither JSON nor safetensors: {', '.join(found)}")
    return verdict


def _judge_end(done: Done, started: Started, played: Played, verdict: Verdict) -> None:
    """Judge how a start ended to which something was done."""
    right = status_right(done, started, played)
    verdict.statuses += 1
    verdict.statuses_right += right
    if not right:
        verdict.flaws.append(f"{done.fault} of start {done.start}: exit status {started.status}")
    finished = started.status == 0 and done.fault.kind not in SIGNALS  # else it may stop up to a second's steps later
    if done.restarted or finished or done.gone_s is None:
        return
    bound = GONE_S
    if done.fault.kind == "stop_rank":
        bound = played.script.timeout_s + STOPPED_S
        if done.fault.place == "starting":
            bound += GONE_S  # the others have to get where they wait for it
    elif any(each.fault.kind == "stop_rank" for each in played.done if each.start == done.start):
        bound += played.script.timeout_s  # it may be what ranks wait for
    verdict.gone_s.append((done.fault.kind, done.gone_s))
    if done.gone_s > bound:
        verdict.flaws.append(f"{done.fault} of start {done.start}: gone after {done.gone_s:.1f} s, not {bound:g}")


def _judge_outcome(directory: Path, reference: Reference, verdict: Verdict) -> None:
    """Compare the end with that of the undisturbed run."""
    summary = json.loads((directory / "summary.json").read_text())
    differing = [name for name in SAME if summary[name] != reference.summary[name]]
    if summary.get(SKIPPED) != reference.summary.get(SKIPPED) and not summary["ranks_replaced"]:
        differing.append(SKIPPED)  # what a lost rank has left out in its last epoch is lost with it
    verdict.identical = not differing
    if differing:
        verdict.flaws.append(f"summary.json differs: {', '.join(differing)}")
    points = files.points(directory)
    verdict.twice = sum(len(values) > 1 for values in points.values())
    verdict.missing = len(reference.points.keys() ^ points.keys())
    both = [key for key in reference.points.keys() & points.keys() if key[0] != TIMES]
    verdict.differing = sum(reference.points[key][-1] != points[key][-1] for key in both)
    for count, words in (
        (verdict.twice, "are there twice"),
        (verdict.missing, "are missing, or more than there should be"),
        (verdict.differing, "have another value"),
    ):
        if count:
            verdict.flaws.append(f"{count} points of TensorBoard {words}")


def named(done: Done, played: Played) -> bool | None:  # noqa: C901, PLR0911 - a case for each kind of fault
    """Return whether the output names the true cause, or ``None`` where nobody was left to name it."""
    kind, rank, pid = done.fault.kind, done.rank, done.pid
    if done.file is not None:
        return _damage_named(done, played)
    started = played.starts[done.start]
    text, local = started.text, played.script.mode != "torchrun"
    own_death = started.alone and (kind.startswith("kill_rank") or kind in ("segfault", "exit_0", "exit_3"))
    late = done.fault.place == "ending" or done.step >= STEPS - 1  # it may have come to its end itself
    too_late = started.status == 0 and done.fault.place not in INSIDE and (late or not done.restarted)
    by_signal = kind in NUMBERS and started.status == -NUMBERS[kind]  # before Python could take it: the shell says it
    if own_death or too_late or by_signal or kind in UNNAMED or done.idle:
        return None
    if kind == "kill_two" and done.second is not None:
        both = ((rank, pid), done.second)
        killed = [f"Rank {each} (process {process}) was killed by SIGKILL" in text for each, process in both]
        return all(killed) or (any(killed) and (late or replacing.started_again(played) > 0))  # then one is named
    by_pid = f"Rank {rank} (process {pid})"
    match kind:
        case "kill_rank" | "kill_rank_0" | "segfault":
            number, name = (11, "SIGSEGV") if kind == "segfault" else (9, "SIGKILL")
            own = f"{by_pid} was killed by {name}"
            return (own if local else f"(exitcode: -{number}) local_rank: {rank} (pid: {pid})") in text
        case "exit_0" | "exit_3":
            status = kind[-1]
            own = f"{by_pid} exited with exit code {status}"
            if not local and status == "0":  # which is no failure to torchrun: the other ranks say it
                return (
                    re.search(rf"Rank ([\d, ]+, )?{rank}(, [\d, ]+)? of \d+ exited without a report", text) is not None
                )
            return (own if local else f"(exitcode: {status}) local_rank: {rank} (pid: {pid})") in text
        case "kill_node":
            return LOST_NODE.search(text) is not None
        case "stop_server":
            return "did not respond and was killed" in text
        case "kill_server":
            return "was killed by SIGKILL" in text
        case "stop_rank":
            return any(found == str(rank) for found in re.findall(r"Rank ([\d, ]+) (?:of \d+ )?did not", text))
        case "kill_worker":
            return re.search(rf"pid(\(s\))? {pid}\b", text) is not None
        case "exception":
            return f"{TEXT} of rank {rank}" in text
        case "disk_full":
            return "No space left on device" in text
    return re.search(SIGNALS[kind], text) is not None


def _damage_named(done: Done, played: Played) -> bool | None:
    """A damaged checkpoint has to be named, unless the byte was one of those between what is stored."""
    assert done.file is not None
    if done.fault.kind not in ("flip_byte", "cut_short") and "/" not in done.file:  # the name is gone with the file
        return None
    later = [played.starts[number].text for number in range(done.start + 1, len(played.starts))]
    if any(done.file in line and "damaged" in line for text in later for line in text.splitlines()):
        return True
    step = int(done.file[5:13])
    unharmed = any(f"from {step:,}\n" in text for text in later)
    return None if unharmed and done.fault.kind == "flip_byte" else False


def status_right(done: Done, started: Started, played: Played) -> bool:
    """Whether the exit status is what the contract says for the last fault of a start."""
    kind, place, status = done.fault.kind, done.fault.place, started.status
    torchrun = played.script.mode == "torchrun"
    if status == 0:
        return started.outcome == "finished" and (done.restarted or place not in INSIDE)
    if kind in ("kill_launcher", "kill_all"):
        return status == -9
    if kind in SIGNALS:
        if torchrun:  # its own statuses, for every failure of its workers and every signal
            return True
        allowed = {75}
        if place == "starting" or kind == "interrupt_twice":
            allowed |= {130, -2}  # which is 130 to a shell
        if played.script.goes_on and replacing.may_lose_all(played):
            allowed |= {1, 130}
        # Outside of training a signal may come before Python takes signals, or when all is done but the leaving.
        default = place == "starting" or started.outcome == "finished"
        return status in allowed or (default and status == -NUMBERS[kind])
    if started.alone:
        own = {"kill_rank": -9, "kill_rank_0": -9, "segfault": -11, "exit_3": 3}
        return status == own.get(kind, 1)
    return status == 1


def losses(played: Played) -> Iterator[tuple[int, int]]:
    """Yield, for each resume, the steps that were lost and those that might have been.

    Nothing after a stop that saved; else what came after the last checkpoint, or the one before a damaged one.
    """
    recipe = RECIPES[played.script.recipe]
    process, reached, saved = None, 0, False
    least: int | None = None  # where a damaged checkpoint leaves the run
    again = max(replacing.started_again(played), replacing.killed_all(played))
    for pid, word, number in played.journal:
        if word == "preempted":
            saved = True
        elif word == "damaged":
            least = number if least is None else min(least, number)
        elif word == "step":
            if pid != process and process is not None:
                # All may have started again, and been stopped before they did a step.
                allowed = 0 if saved and not again else recipe.interval + recipe.under_way
                if least is not None:
                    allowed = max(allowed, reached - least)
                lost = reached - (number - 1)
                if played.script.goes_on and not (lost > 1 and played.script.may_be_hurt == 1):  # else it may be alone
                    allowed, again = (allowed, again - 1) if lost > 1 and again else (1, again)  # the step cut off
                yield lost, allowed
                saved, least = False, None
            process, reached = pid, number


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
