"""One node of a run: what it brings to each start of the ranks, and how many losses it has counted."""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_recipes.config.request import Request
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.launchers.fork_server import ForkServer
from ddp_recipes.launchers.local.ranks import Starter
from ddp_recipes.launchers.nodes.copies import Copies
from ddp_recipes.launchers.nodes.start import Offer, Start
from ddp_recipes.launchers.nodes.supervision import Ended, Supervision
from ddp_recipes.launchers.reports import Outcome
from ddp_recipes.launchers.worker import FIRSTS
from ddp_recipes.recovery.memory import SnapshotSlots
from ddp_recipes.recovery.replacement import BY_CHANCE
from ddp_recipes.recovery.source import CLOCK_AHEAD, ahead_s
from ddp_recipes.reporting.run_directory import Summary, read_summary
from ddp_recipes.runtime.job import Job, Regroup

if TYPE_CHECKING:
    from ddp_recipes.launchers.nodes.rendezvous import Rendezvous


FROM_CHECKPOINT = "No node has the state in memory: all start again, from the last checkpoint."


class Node:
    """Runs this node's ranks, start by start.

    Args:
        ranks: how many it can run.
        server: that starts them; without one each is started anew.
        signals: names of those that this process gets, also while it runs them.
        stack: until whose end this process has their states in its memory.
    """

    def __init__(
        self,
        job: Job,
        request: Request,
        ranks: int,
        server: ForkServer | None,
        rendezvous: "Rendezvous",
        signals: Sequence[str],
        stack: ExitStack,
    ) -> None:
        # Nodes may have as many ranks as they can, and have addresses of their own; all else is the same.
        launcher = {**job.config["launcher"], "nproc_per_node": "auto", "local_addr": None}
        self._job = replace(job, config={**job.config, "launcher": launcher})
        self._directory = job.directory  # of the run, as the first node has it
        self._request, self._server, self._rendezvous, self._signals = request, server, rendezvous, signals
        self._slots = SnapshotSlots.made(ranks, stack)
        self._copies = Copies(self._slots, rendezvous.address, rendezvous.key, stack)
        offer = Offer(ranks, str(job.directory), digest(self._job), os.urandom(8).hex())
        self._offer = replace(offer, port=self._copies.port, own=self._copies.own)
        self._losses = 0
        self._errors = set[str]()  # of ranks, which come again if they are not by chance
        self._hangs = Counter[int]()  # of this node's ranks, by how far the run had come before

    def run(self, before: Summary | None) -> Summary:
        """Run to the end and return the summary.

        Args:
            before: the summary that there was in the run directory.
        """
        while True:
            try:
                start = self._join()
            except RunFailed:  # it may have come to its end meanwhile
                found = read_summary(self._directory)
                if found is None or found == before or found["status"] != "finished":
                    raise
                return found
            if (summary := self._run(start)) is not None:
                return summary

    def _join(self) -> Start:
        """Return the next start of the ranks, once the nodes that there are have met."""
        held = () if self._request.strategy.kind == "replicated" else self._copies.held()
        start = self._rendezvous.join(replace(self._offer, held=held))
        losses, reported = start.losses, start.reported
        if losses and not start.states:
            losses, reported = (), 0  # what the run counts, it counts from there on
            if start.node == 0:
                print(FROM_CHECKPOINT, file=sys.stderr, flush=True)
        self._offer = replace(self._offer, losses=losses, reported=reported, former=start.nodes)
        return start

    def _run(self, start: Start) -> Summary | None:
        """Run the ranks in a start; return the summary if the run has come to its end."""
        with ExitStack() as stack:
            last = False
            stack.callback(lambda: start.heartbeats.end(last))
            world = _ranks_of(self._request, start)
            job, parts = _job(self._job, start, world), self._request.strategy.layout(world).parts
            self._directory, other = job.directory, start.offers[start.node - 1]
            if parts > 1 and len(start.offers) > 1 and self._request.checkpoint.in_memory_every_n_steps:
                stack.enter_context(self._copies.following(other.address, other.port, other.own, start.name))
            starter = self._starter(job, start, world, stack)
            whole = parts == 1 and self._request.strategy.kind == "replicated"
            ended = Supervision(job, start, starter, self._signals, whole).run()
            if ended.outcome is not None:
                summary, last = ended.outcome.conclude(job), True
                self._rendezvous.close()
                return summary
            self._count(ended, job, start.step)
            self._offer = ended.offer(self._offer, self._slots)
            return None

    def _starter(self, job: Job, start: Start, world: int, stack: ExitStack) -> Starter:
        """Return what starts this node's ranks, which may be none."""
        first = min(sum(offer.ranks for offer in start.offers[: start.node]), world)
        nodes = len(start.offers)
        environ = {
            "MASTER_ADDR": start.address,
            "MASTER_PORT": str(start.port),
            "TORCHELASTIC_RUN_ID": start.name,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GROUP_RANK": str(start.node),
            CLOCK_AHEAD: str(ahead_s()),
            FIRSTS: " ".join(
                str(ranks.start) for ranks in map(start.ranks_of, range(nodes)) if ranks and ranks.start < world
            ),
        }
        count = min(start.offers[start.node].ranks, world - first)
        return Starter(job, count, self._server, stack, first, world, environ, self._slots.paths)

    def _count(self, ended: Ended, job: Job, step: int) -> None:
        """Count a loss, and tell it; end the run for all nodes if there were too many, or it is not by chance."""
        if not ended.why:
            return
        self._losses += 1
        self._hangs[step] += ended.hung
        why, again = [*ended.why], ended.error is not None and (not ended.began or ended.error in self._errors)
        if (times := self._hangs[step]) > BY_CHANCE:
            again = True
            why.append(f"{times} times no step came after {step}: these ranks hang there, or do not reach the others'.")
        if again or self._losses > job.config["launcher"]["replace_ranks"]:
            self._rendezvous.close()
            Outcome(RunFailed("\n".join(why)), why[0].splitlines()[0], known_better=True).conclude(job)
        print(*why, sep="\n", file=sys.stderr, flush=True)
        if ended.error is not None:
            self._errors.add(ended.error)


def digest(job: Job) -> str:
    """Return what two jobs have in common only if they are of the same config."""
    return blake2b(json.dumps(job.config, sort_keys=True).encode(), digest_size=8).hexdigest()


def _ranks_of(request: Request, start: Start) -> int:
    """Return the most ranks that the nodes have and the strategy can have."""
    world = sum(offer.ranks for offer in start.offers)
    while True:
        try:
            request.strategy.check_world_size(world)
            return world
        except RequestError:
            if world == 1:
                raise
            world -= 1


def _job(job: Job, start: Start, world: int) -> Job:
    """Return the job as it begins, or goes on from what the first node has: a state in memory, or on disk."""
    source = start.offers[0]
    job = replace(job, directory=Path(source.directory), start=start.name)
    if not (states := start.states):
        return job.resumed(main=start.node == 0) if source.began else job
    why, since = tuple(text for text, _ in start.losses), tuple(when for _, when in start.losses)
    sources = tuple(range(len(states)))
    return replace(job, regroup=asdict(Regroup("", sources, tuple(range(world)), why, since, start.reported, states)))
