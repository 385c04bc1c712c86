"""Watches a node's ranks in one start of a run on several nodes, and whether the other nodes are there."""

import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_recipes.errors import RunFailed
from ddp_recipes.launchers.local.launcher import AFTER_INTERRUPT_S, AFTER_TERM_S, end_with_stacks
from ddp_recipes.launchers.local.ranks import Rank, Starter, incoming
from ddp_recipes.launchers.nodes.start import Offer, Start
from ddp_recipes.launchers.reports import Outcome, decide
from ddp_recipes.recovery.memory import SnapshotId, SnapshotSlots
from ddp_recipes.recovery.replacement import ANSWER_S, progress
from ddp_recipes.recovery.source import ahead_s, moment
from ddp_recipes.reporting.run_directory import read_summary
from ddp_recipes.runtime.job import Job


@dataclass(frozen=True)
class Ended:
    """How a start ended on this node.

    Attributes:
        outcome: of the run; without one, ranks start again on all nodes that are left.
        why: lines on the ranks and nodes that were lost, as far as this node knows.
        since: the :func:`moment` at which that was noticed.
        error: the last line of what a rank raised.
        hung: whether a rank of this node hung.
        began: whether ranks have trained.
        after: how much of what follows its last step the rank had done that left its state.
        saved_step: of the newest checkpoint.
        whole: whether a rank's state is that of the whole model.
        reported: how many losses are reported to the user.
    """

    outcome: Outcome | None = None
    why: tuple[str, ...] = ()
    since: float = 0.0
    error: str | None = None
    hung: bool = False
    began: bool = False
    after: int = 2
    saved_step: int = -1
    whole: bool = True
    reported: int = 0

    def offer(self, before: Offer, slots: SnapshotSlots) -> Offer:
        """Return what this node brings to the next start: its newest state, unless a checkpoint is newer."""
        losses = (*before.losses, *((each.splitlines()[0], self.since) for each in self.why))
        former = tuple(each for each in before.former if each[1] not in self.why)
        saved_step = max(before.saved_step, self.saved_step)
        before = replace(before, former=former, left=moment(), saved_step=saved_step)
        (step, *_), path = max(slots.each(), default=(SnapshotId(-1), ""))
        if step < self.saved_step or not self.whole:
            step, path = -1, ""
        began, reported = before.began or self.began, max(before.reported, self.reported)
        return replace(before, step=step, after=self.after, state=path, began=began, losses=losses, reported=reported)


class Supervision:
    """Watches the ranks of a node.

    Args:
        signals: names of those that this process gets, also while it watches.
        whole: whether a rank's state is that of the whole model.
    """

    def __init__(self, job: Job, start: Start, starter: Starter, signals: Sequence[str], whole: bool) -> None:
        self.job, self.start, self.signals, self.whole = job, start, signals, whole
        self.ranks = starter.all()
        self._since: float | None = None  # when a loss was noticed, by the clock that is never set
        self._nodes: list[int] = []  # that were lost
        self._known: set[int] = set()  # ranks of which this node's know that they are lost
        self._leaving: set[int] = set()  # ranks that are about to
        self._not_ready: set[int] = set()  # ranks that were ended before they had joined the others
        self._timeout_s = float(job.config["launcher"]["timeout_s"])
        self._after = 2
        self._moved = self._signalled = False
        self._told: float | None = None  # when a signal came, by the clock that is never set

    def run(self) -> Ended:
        """Watch to the end.

        Raises:
            KeyboardInterrupt: twice.
            RunFailed: this node is cut off.
        """
        heartbeats = self.start.heartbeats
        for _ in incoming(self.ranks):
            self._pass_on_signals()
            lost = self._lost
            heartbeats.update((rank.number for rank in lost), any(map(self._died, lost)), self._silent, self._reported)
            if heartbeats.cut_off:
                raise RunFailed(
                    f"This node is cut off from {self.start.endpoint}, where nodes meet: others go on without it."
                )
            reports = {rank.number: rank.report for rank in self.ranks if rank.report is not None}
            kinds = [report.kind for report in reports.values()]
            if "refused" in kinds or "preempted" in kinds:
                return Ended(self._decided())
            finished = kinds.count("summary") == len(self.ranks)  # as without ranks: the others are waited for
            if finished and (self.start.node == 0 or heartbeats.ended):  # rank 0 ends after all others
                return Ended(self._finished())
            self._look_for_losses()
            none = all(rank.lost or rank.report is not None for rank in self.ranks)
            if none and (self._since is not None or not finished or 0 in heartbeats.left):
                heartbeats.leave()
                if self._knows_why():
                    return self._ended()
            if heartbeats.waiting and not self._moved and all(rank.joined for rank in self.ranks):
                self._moved = True
                if self.ranks and self.ranks[0].number == 0:
                    self.ranks[0].send(json.dumps({"move": True}))
        raise AssertionError("there is always more")

    def _pass_on_signals(self) -> None:
        if self.signals.count("SIGINT") > 1:
            raise KeyboardInterrupt
        if self.signals and not self._signalled and self._goes_on():
            self._signalled = True
            for rank in self.ranks:
                rank.process.send_signal(signal.SIGTERM)

    def _goes_on(self) -> bool:
        """Whether ranks have all that was in memory, so that those that are told to stop save it."""
        if not self.start.states or all(rank.lost or rank.report is not None for rank in self.ranks):
            return True
        self._told = self._told or time.monotonic()
        late = time.monotonic() - self._told > AFTER_INTERRUPT_S
        return late or max(self._reported, self.start.heartbeats.reported) >= len(self.start.losses)

    def _look_for_losses(self) -> None:
        """Have ranks that are left notice a loss, here or on another node, and leave once all have."""
        heartbeats = self.start.heartbeats
        self._nodes += [node for node in heartbeats.lost if node not in self._nodes]
        waiting = [rank for rank in self.ranks if rank.loss is not None and not rank.lost]
        if not (self._lost or waiting or self._nodes or heartbeats.exited or heartbeats.left):
            return
        self._since = self._since or time.monotonic()
        numbers = {rank.number for rank in self._lost} | heartbeats.exited
        numbers |= {number for node in self._nodes for number in self.start.ranks_of(node)}
        there = [rank for rank in self.ranks if not rank.lost and rank.report is None]
        if numbers - self._known:
            self._known = numbers
            for rank in there:
                rank.send(json.dumps({"exited": sorted(numbers)}))
        others = [rank for rank in there if rank.loss is None and rank.number not in self._leaving]
        waited_s = time.monotonic() - self._since - ANSWER_S
        if not others and waiting:
            self._leave(waiting)
        elif waited_s > 0:  # with a rank lost, others may notice when they next need it
            self._end(others, all_hang=waited_s > (self._timeout_s if numbers else 0))

    @property
    def _lost(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.lost]

    @property
    def _silent(self) -> set[int]:
        return {number for rank in self.ranks if rank.report for number in rank.report.unresponsive}

    @property
    def _reported(self) -> int:
        return max((rank.reported for rank in self.ranks), default=0)

    def _died(self, rank: Rank) -> bool:
        return rank.death is not None and rank.number not in self._not_ready

    def _end(self, others: Sequence[Rank], all_hang: bool) -> None:
        """End ranks that have not noticed a loss: those that are not ready yet have nothing to leave."""
        silent = self._silent | self.start.heartbeats.silent
        hung = [rank for rank in others if rank.number in silent or (rank.joined and all_hang)]
        for rank in others:
            rank.hung = rank in hung
            if not (rank.joined or rank.hung or rank.number in self._not_ready):
                self._not_ready.add(rank.number)
                rank.process.send_signal(signal.SIGKILL)
        if hung:
            end_with_stacks(self.job, hung)

    def _leave(self, waiting: Sequence[Rank]) -> None:
        """Have ranks end, of which the furthest leaves its state: of a whole model, and what others have not."""
        whole = [rank for rank in waiting if rank.loss and (not rank.loss.alone or rank.number in rank.loss.alone)]
        keeps = max(whole, key=progress, default=None) if self.whole else None
        for rank in waiting:
            if rank is keeps:
                self._after = progress(rank).after
            rank.loss = None
            self._leaving.add(rank.number)
            rank.send(json.dumps({"leave": rank is keeps}))

    def _knows_why(self) -> bool:
        """Whether this node need not wait to know which other one was lost."""
        return self._since is None or any(map(self._died, self._lost)) or self.start.heartbeats.all_known

    def _ended(self) -> Ended:
        """Return how this start ended, for others to go on."""
        deaths = [rank for rank in self._lost if self._died(rank)]
        why = [self.start.nodes[node][1] for node in self._nodes]
        why += [rank.why for rank in deaths]
        failed = [(rank, rank.report) for rank in self._lost if rank.report and rank.report.cause]
        own = [(rank, report) for rank, report in failed if not report.unresponsive]
        died = bool(why) or self.start.heartbeats.died  # what ranks raised may come of that
        counted = [] if died else own or failed[:1]
        for rank, report in own or counted:
            print(f"Rank {rank.number} failed:\n{report.message.rstrip()}", file=sys.stderr, flush=True)
        why += [rank.why for rank, _ in counted]
        raised = [] if died else [report.message.strip().splitlines()[-1] for _, report in own]
        return Ended(
            why=tuple(why),
            since=moment() if self._since is None else self._since + ahead_s(),
            error=raised[0] if raised else None,
            hung=any(rank.hung for rank in deaths),
            began=any(rank.joined for rank in self.ranks),
            after=self._after,
            saved_step=self.job.saved_step,
            whole=self.whole,
            reported=max(self._reported, self.start.heartbeats.reported),
        )

    def _finished(self) -> Outcome:
        """Return the outcome where all ranks of this node, if it had any, have come to the end."""
        self._await_exits(AFTER_INTERRUPT_S)
        summaries = [rank.report.summary for rank in self.ranks if rank.report and rank.report.summary is not None]
        return Outcome(summaries[0] if summaries else read_summary(self.job.directory) or {})

    def _decided(self) -> Outcome:
        self._await_exits(AFTER_TERM_S)
        reports = {rank.number: rank.report for rank in self.ranks if rank.report is not None}
        return decide(reports, signals=self.signals)

    def _await_exits(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for _ in incoming(self.ranks):
            if time.monotonic() > deadline or all(rank.process.returncode is not None for rank in self.ranks):
                return
