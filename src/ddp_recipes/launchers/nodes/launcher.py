"""Runs this node's ranks in a run of several nodes, from a process on each of them."""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Literal

from ddp_recipes.config.keys import Count, Seconds
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.devices import visible
from ddp_recipes.errors import RequestError
from ddp_recipes.launchers.base import Resources
from ddp_recipes.launchers.local.launcher import signals_caught
from ddp_recipes.launchers.nodes.node import Node
from ddp_recipes.recovery.source import clock_of_nodes
from ddp_recipes.reporting.run_directory import Summary, read_summary
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.process import loading


@dataclass(frozen=True, kw_only=True)
class NodesSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=nodes``: at most ``nnodes`` take part, and ``replace_ranks`` losses are borne."""

    name: Literal["nodes"]
    rdzv_endpoint: str | None
    rdzv_id: str
    local_addr: str | None
    min_nodes: Count
    lost_after_s: Seconds
    more_after_s: Seconds

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


@dataclass(frozen=True)
class NodesLauncher:
    """Runs this node's ranks, and starts them again whenever ranks or nodes are lost, or nodes come."""

    settings_class: ClassVar[type[LauncherSettings]] = NodesSettings
    settings: NodesSettings
    resources: Resources

    def launch(self, job: Job) -> Summary:
        self.resources.refuse_started_ranks(
            "nodes", "start one task a node with launcher=nodes on its command line, not in a yaml"
        )
        before = read_summary(job.directory)  # now: the run of the others may end while torch is loaded
        settings, request = self.settings, Request.of(job.config)
        ranks = request.processes_on_node(visible(settings.device))
        settings.check_processes(ranks)
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
        server = self.resources.server if settings.start_method == "forkserver" else None
        with signals_caught(job.last) as signals, ExitStack() as stack:
            stack.enter_context(clock_of_nodes())
            rendezvous = Rendezvous(settings, signals)
            stack.callback(rendezvous.leave)
            return Node(job, request, ranks, server, rendezvous, signals, stack).run(before)
