"""Replaces lost ranks while the others keep their processes: who is lost, who has the state, where all regroup."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.launchers.local import launcher as local
from ddp_recipes.launchers.local.ranks import Rank, Starter
from ddp_recipes.recovery.memory import SnapshotSlots
from ddp_recipes.recovery.source import Candidate, Progress, Source, ahead_s, furthest, moment
from ddp_recipes.runtime.job import Job, Regroup

ANSWER_S = 5.0  # for a rank to notice the loss of another one, once a collective has timed out
BY_CHANCE = 2  # times at most that a rank hangs at one step


class Survival(local.Survival):
    """What is done about ranks that fail: lost ones are replaced, or all start again from what is in memory.

    A restart takes the newer of a checkpoint and what is in memory. Once there are no more of those that
    ``launcher.max_restarts`` grants, one counts as a replacement, unless its cause came again.
    """

    def __init__(self, job: Job, settings: LauncherSettings, processes: int, memory: ExitStack) -> None:
        super().__init__(job, settings, processes, memory)
        self._origin = job
        self._spare = settings.replace_ranks
        self._parts = strategy_settings(job.config["strategy"]).layout(processes).parts
        keeps = job.config["checkpoint"].get("in_memory_every_n_steps")
        self._slots = SnapshotSlots.made(self._parts, memory) if keeps else None
        self._seen: set[str] = set()  # failures, which come again if they are not by chance
        self._known: list[tuple[str, float]] = []  # why ranks were lost, and when
        self._reported = 0  # of those, to the user

    def start(self, starter: Starter) -> list[Rank]:
        """Start all ranks, which keep their states in memory if they are to."""
        if self._slots is not None:
            starter.memory = self._slots.paths
        hung = partial(local.end_with_stacks, self.job)
        timeout_s = self.settings.timeout_s
        self._replacement = Replacement(starter, self._spare, self._parts, timeout_s, hung, self._known, self._reported)
        return super().start(starter)

    def goes_on(self, ranks: list[Rank]) -> bool:
        """Replace lost ranks where others have what they had; say so to those that wait where none is any more."""
        replaces = 0 < self._parts < len(ranks) and self.settings.replace_ranks > 0
        return replaces and self._replacement.goes_on(ranks)

    def after(self, error: str, stopped: bool) -> str | None:
        """Return how all ranks are started again after a failure, a line; ``None`` where they are not."""
        former = self._replacement
        self._spare -= former.number
        if untold := former.untold:
            print(*untold, sep="\n", file=sys.stderr, flush=True)
        granted = self.restarts < self.settings.max_restarts
        if stopped or not (granted or (self._spare > 0 and not former.again and error not in self._seen)):
            return None
        self._seen.add(error)
        self._reported = former.reported
        self.job, whence = self._again(error)
        self._reported = self._reported if self._known else 0
        if granted:
            self.restarts += 1
            return f"Restart {self.restarts} of {self.settings.max_restarts}, from {whence}."
        self._spare -= 1
        return f"No rank has all that the lost one had: all start again, from {whence}."

    def _again(self, error: str) -> tuple[Job, str]:
        """Return the job as all ranks start it again, and from what: a checkpoint, or what is in memory if newer."""
        newest, saved = None if self._slots is None else self._slots.newest(), self._origin.saved_step
        if newest is None or newest.point <= saved:
            self._known.clear()  # what they came to is in summary.json
            return self._origin.resumed(), "the last checkpoint" if saved >= 0 else "step 0"
        self._known.append((error.splitlines()[0], moment()))
        why, since = zip(*self._known, strict=True)
        parts, ranks = tuple(range(len(newest.places))), tuple(range(self.processes))
        regroup = Regroup("", parts, ranks, why, since, self._reported, newest.places)
        return replace(self._origin, regroup=asdict(regroup)), f"step {newest.point}, which is in memory"


@dataclass
class Replacement:
    """Decides for a run whether ranks that are lost are replaced, and does it.

    Attributes:
        most: of ranks replaced in a run.
        parts: of the model; rank r has part r modulo that.
        kill: ends ranks that hang, and keeps their stacks.
        number: of those until now.
        again: why those that are lost now are not: they were, at this very step, before.
    """

    starter: Starter
    most: int
    parts: int
    timeout_s: float
    kill: Callable[[Sequence[Rank]], None]
    known: list[tuple[str, float]]  # why each rank was lost, and when that was noticed
    reported: int = 0  # of those, by rank 0
    number: int = 0
    again: str = ""
    _since: float | None = None  # when the loss was noticed, by the clock that is never set
    _over: bool = False  # whether the run ends
    _announced: set[int] | None = None  # lost ranks that the others know of
    _times: Counter[tuple[str, int]] = field(default_factory=Counter)  # that ranks were lost, by cause and step

    @property
    def untold(self) -> list[str]:
        """Lines on losses of which no rank was left to tell."""
        lines = [f"{why} It was being replaced when:" for why, _ in self.known[self.reported :]]
        return [*lines, self.again] if self.again else lines

    def goes_on(self, ranks: list[Rank]) -> bool:
        """Return whether the run goes on although ranks are lost; new ones may take their places in the list."""
        self.reported = max(self.reported, ranks[0].reported)
        lost = [rank for rank in ranks if rank.lost]
        waiting = [rank for rank in ranks if rank.loss is not None and rank not in lost]
        if self._over:
            self._end(waiting)
        if self._over or not (lost or waiting):
            return False
        self._since = self._since or time.monotonic()
        self._tell(ranks, lost)
        others = [rank for rank in ranks if rank not in lost and rank not in waiting]
        ended = any(rank.report is not None and not rank.lost for rank in ranks)
        began = self.number > 0 or all(rank.joined for rank in ranks)
        if ended or not began or not self._can(lost, waiting, others):
            self._end(waiting)
            return False
        if not others:
            self._regroup(ranks, lost, waiting)
        elif time.monotonic() > self._since + ANSWER_S + (self.timeout_s if _may_notice(lost, others) else 0):
            for rank in others:
                rank.hung = True
            self.kill(others)
        return True

    def _tell(self, ranks: Sequence[Rank], lost: Sequence[Rank]) -> None:
        """Tell the others that ranks are lost, and which they need not wait for."""
        numbers = {rank.number for rank in lost}
        if self._announced is None or numbers - self._announced:
            self._announced = numbers | (self._announced or set())
            for rank in ranks:
                if rank not in lost:
                    rank.send(json.dumps({"exited": sorted(self._announced)}))

    def _can(self, lost: Sequence[Rank], waiting: Sequence[Rank], others: Sequence[Rank]) -> bool:
        """Whether what is known so far leaves a way on."""
        there = {rank.number % self.parts for rank in (*waiting, *others)}
        if self.number + max(1, len(lost)) > self.most or len(there) < self.parts:
            return False
        alone = {number for rank in waiting if rank.loss is not None for number in rank.loss.alone}
        if alone & {rank.number for rank in lost}:
            return False
        if others:
            return True
        source = self._source(waiting)
        if source is None or any(rank.number in alone and progress(rank) != source.point for rank in waiting):
            return False
        self.again = self._before(lost, source.point.step)
        return not self.again

    def _before(self, lost: Sequence[Rank], step: int) -> str:
        """Note why ranks were lost at a step; return a line on what has come too often to be by chance, if any has."""
        by_chance = {rank.report.message.strip().splitlines()[-1]: 1 for rank in lost if rank.report}
        by_chance |= {rank.why: BY_CHANCE for rank in lost if rank.hung}
        self._times.update((cause, step) for cause in by_chance)
        for cause, most in by_chance.items():
            if (times := self._times[cause, step]) > most:
                return f"{times} times at step {step}, so nobody is replaced again: {cause}"
        return ""

    def _source(self, waiting: Sequence[Rank]) -> Source[Progress, int] | None:
        """Return how far all parts of the model have come, and on which ranks; ``None``: one is always elsewhere."""
        return furthest(
            Candidate(progress(rank), rank.number % self.parts, self.parts, rank.number) for rank in waiting
        )

    def _regroup(self, ranks: list[Rank], lost: Sequence[Rank], waiting: Sequence[Rank]) -> None:
        """Start new ranks, and send all where they regroup."""
        assert self._since is not None
        self.number += max(1, len(lost))
        # A new rank that fails because of another one is no loss of its own.
        died = any(rank.death is not None for rank in lost)
        by_itself = [r for r in lost if r.joined or r.report is None or not (died or r.report.unresponsive)]
        self.known += [(rank.why, self._since + ahead_s()) for rank in by_itself]
        file, source = self.starter.new_store(), self._source(waiting)
        assert source is not None
        regroup = asdict(
            Regroup(
                file=f"/proc/{os.getpid()}/fd/{file.fileno()}",
                sources=source.places,
                lost=tuple(rank.number for rank in lost),
                why=tuple(why for why, _ in self.known),
                since=tuple(since for _, since in self.known),
                reported=self.reported,
            )
        )
        for rank in lost:
            if rank.report is not None:
                print(f"Rank {rank.number} failed:\n{rank.report.message.rstrip()}", file=sys.stderr, flush=True)
            rank.end()
            ranks[rank.number] = self.starter.one(rank.number, file, replace(self.starter.job, regroup=regroup))
        for rank in waiting:
            rank.loss, rank.joined = None, False
            rank.send(json.dumps({"regroup": regroup}))
        self._since, self._announced = None, None

    def _end(self, waiting: Sequence[Rank]) -> None:
        """Fail the ranks that wait for the lost one as well."""
        self._over = True
        for rank in waiting:
            rank.loss = None
            rank.send(json.dumps({"regroup": None}))


def _may_notice(lost: Sequence[Rank], others: Sequence[Rank]) -> bool:
    """Whether the others may yet wait for a lost one, and are not all what the lost ones have waited for."""
    silent = {number for rank in lost if rank.report is not None for number in rank.report.unresponsive}
    return bool(lost) and not silent.issuperset(rank.number for rank in others)


def progress(rank: Rank) -> Progress:
    """Return how far a rank had come that waits."""
    assert rank.loss is not None
    return Progress(rank.loss.step, rank.loss.after)
