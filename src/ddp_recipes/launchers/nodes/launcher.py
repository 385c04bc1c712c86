"""Runs a node's ranks in a run of several nodes; on a loss all nodes that are left start theirs anew."""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ddp_recipes.config.keys import Count, Range
from ddp_recipes.config.request import Request, visible_gpus
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.launchers.base import Resources
from ddp_recipes.launchers.local.launcher import signals_caught
from ddp_recipes.launchers.local.ranks import Starter
from ddp_recipes.launchers.nodes.copies import Copies
from ddp_recipes.launchers.nodes.start import Offer, Start
from ddp_recipes.launchers.nodes.supervision import Ended, Supervision
from ddp_recipes.launchers.reports import Outcome
from ddp_recipes.launchers.worker import FIRSTS
from ddp_recipes.reporting.run_directory import Summary, read_summary
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.meeting import Meeting
from ddp_recipes.runtime.memory import Places
from ddp_recipes.runtime.process import loading

if TYPE_CHECKING:
    from ddp_recipes.launchers.nodes.rendezvous import Rendezvous


FROM_CHECKPOINT = "No node has the state in memory: all start again, from the last checkpoint."


@dataclass(frozen=True, kw_only=True)
class NodesSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=nodes``: at most ``nnodes`` take part, and ``replace_ranks`` losses are borne."""

    name: Literal["nodes"]
    rdzv_endpoint: str | None
    rdzv_id: str
    local_addr: str | None
    min_nodes: Count
    lost_after_s: Annotated[float, Range(1)]
    more_after_s: Annotated[float, Range(1)]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_nodes > self.nnodes:
            raise RequestError(
                f"launcher.min_nodes={self.min_nodes} is more than launcher.nnodes={self.nnodes}, the most."
            )
        if self.max_restarts:
            raise RequestError(
                f"launcher.max_restarts={self.max_restarts} is not taken by launcher=nodes, where "
                f"launcher.replace_ranks counts all losses."
            )


@dataclass
class NodesLauncher:
    """Runs this node's ranks, and starts them again whenever ranks or nodes are lost, or nodes come."""

    settings_class: ClassVar[type[LauncherSettings]] = NodesSettings
    settings: NodesSettings
    resources: Resources
    _losses: int = 0
    _errors: set[str] = field(default_factory=set)  # of ranks, which come again if they are not by chance

    def launch(self, job: Job) -> Summary:
        """Run a job and return its summary."""
        self.resources.refuse_started_ranks(
            "nodes", "start one task a node with launcher=nodes on its command line, not in a yaml"
        )
        before = read_summary(job.directory)  # now: the run of the others may end while torch is loaded
        settings, request = self.settings, Request.of(job.config)
        ranks = request.processes_on_node(visible_gpus())
        if settings.rdzv_endpoint is None:
            raise RequestError(
                "launcher=nodes needs launcher.rdzv_endpoint: host:port of one of the nodes, or file:///path of a file "
                "that all share; the same on all."
            )
        if settings.min_nodes < settings.nnodes and request.strategy.fixed_shards is None:
            raise RequestError(
                f"launcher.min_nodes={settings.min_nodes} lets ranks become fewer, and with {request.strategy.name} "
                f"the result depends on how many there are. Set launcher.min_nodes={settings.nnodes}, or choose a "
                f"strategy that adds up fixed shards."
            )
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else pages of C++ frames when a node is lost
        with loading():
            from ddp_recipes.launchers.nodes.rendezvous import Rendezvous
        with signals_caught(job.last) as signals, ExitStack() as stack:
            rendezvous = Rendezvous(settings)
            stack.callback(rendezvous.leave)
            places = Places.made(ranks, stack)
            # Nodes may have as many ranks as they can, and have addresses of their own; all else is the same.
            launcher = {**job.config["launcher"], "nproc_per_node": "auto", "local_addr": None}
            job = replace(job, config={**job.config, "launcher": launcher})
            copies = Copies(places, rendezvous.address, rendezvous.key, stack)
            offer = Offer(ranks, str(job.directory), digest(job), os.urandom(8).hex())
            offer, directory = replace(offer, port=copies.port, own=copies.own), job.directory
            while True:
                held = () if request.strategy.whole_model else copies.held()
                try:
                    start = rendezvous.meet(replace(offer, held=held), signals)
                except RunFailed:  # it may have come to its end meanwhile
                    found = read_summary(directory)
                    if found is None or found == before or found["status"] != "finished":
                        raise
                    return found
                offer = replace(offer, losses=start.losses, reported=start.reported, former=start.nodes)
                if start.losses and not start.states:
                    offer = replace(offer, losses=(), reported=0)  # what the run counts, it counts from there on
                    if start.node == 0:
                        print(FROM_CHECKPOINT, file=sys.stderr, flush=True)
                with ExitStack() as running:
                    last = False
                    running.callback(lambda: start.alive.end(last))  # noqa: B023 (called in this turn)
                    world = _ranks_of(request, start)
                    of_start, parts = _job(job, start, world), request.strategy.parts(world)
                    directory, other = of_start.directory, start.offers[start.node - 1]
                    if parts > 1 and len(start.offers) > 1 and request.checkpoint.in_memory_every_n_steps:
                        running.enter_context(copies.following(other.address, other.port, other.own, start.name))
                    starter = self._starter(of_start, start, world, running, places)
                    whole = parts == 1 and request.strategy.whole_model
                    ended = Supervision(of_start, start, starter, signals, whole).run()
                    if ended.outcome is not None:
                        summary, last = ended.outcome.conclude(of_start), True
                        rendezvous.close()
                        return summary
                    self._count(ended, of_start, rendezvous)
                    offer = ended.offer(offer, places)

    def _starter(self, job: Job, start: Start, world: int, stack: ExitStack, places: Places) -> Starter:
        """Return what starts this node's ranks, which may be none."""
        first = min(sum(offer.ranks for offer in start.offers[: start.node]), world)
        nodes = len(start.offers)
        environ = {
            "MASTER_ADDR": start.address,
            "MASTER_PORT": str(start.port),
            "TORCHELASTIC_RUN_ID": start.name,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GROUP_RANK": str(start.node),
            FIRSTS: " ".join(
                str(ranks.start) for ranks in map(start.ranks_of, range(nodes)) if ranks and ranks.start < world
            ),
        }
        server = self.resources.server if self.settings.start_method == "forkserver" else None
        count = min(start.offers[start.node].ranks, world - first)
        return Starter(job, count, server, stack, places, first, world, environ)

    def _count(self, ended: Ended, job: Job, rendezvous: "Rendezvous") -> None:
        """Count a loss, and tell it; end the run for all nodes if there were too many, or an error has come again."""
        if not ended.why:
            return
        print(*ended.why, sep="\n", file=sys.stderr, flush=True)
        self._losses += 1
        by_chance = ended.error is None or (ended.began and ended.error not in self._errors)
        if self._losses > self.settings.replace_ranks or not by_chance:
            rendezvous.close()
            text = "\n".join(ended.why)
            Outcome(RunFailed(text), ended.why[0].splitlines()[0], known_better=True).conclude(job)
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
    return replace(job, meeting=asdict(Meeting("", sources, tuple(range(world)), why, since, start.reported, states)))
