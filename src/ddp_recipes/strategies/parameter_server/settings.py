"""What ``strategy=parameter_server`` means for the shape of a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddp_recipes.config.keys import Count, Natural
from ddp_recipes.config.parallelism import BatchShards, StrategySettings
from ddp_recipes.devices import HOST_BACKEND
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World

if TYPE_CHECKING:
    from ddp_recipes.config.request import Request


@dataclass(frozen=True, kw_only=True)
class ParameterServerSettings(StrategySettings):
    """The first ranks serve, each a shard of the parameters; all others work, each as one replica.

    Attributes:
        servers: ranks that serve.
        staleness: steps that a worker may be ahead of the slowest; 0: none, which makes the training synchronous.
    """

    name: ClassVar[str] = "parameter_server"
    backend: ClassVar[str | None] = HOST_BACKEND

    servers: Count = 1
    staleness: Natural = 0

    @property
    def asynchronous(self) -> bool:
        """Whether workers run ahead of each other."""
        return self.staleness > 0

    def check_world_size(self, world_size: int) -> None:
        """Refuse a run without a worker."""
        if world_size <= self.servers:
            raise RequestError(
                f"strategy.servers={self.servers} of {world_size} process(es) leave no worker. Use at least "
                f"{self.servers + 1} processes (launcher.nproc_per_node), or strategy=single for one."
            )
        super().check_world_size(world_size)

    def auto_processes(self, fit: int | None) -> int:
        """Return two workers, or what the GPUs leave of them, beside the servers."""
        return self.servers + 2 if fit is None and self.processes is None else super().auto_processes(fit)

    def outlives(self, rank: int) -> bool:
        """Whether the run goes on without this rank: a worker for whose gradients the others do not wait."""
        return self.asynchronous and rank >= self.servers

    def batch_shards(self, world: World) -> BatchShards:
        """Return a worker's own shard, or all where workers take what is free; servers have none."""
        self.check_world_size(world.world_size)
        workers = world.world_size - self.servers
        if world.rank < self.servers:
            return BatchShards.none(workers)
        if self.asynchronous:
            return BatchShards(0, workers, workers)
        return BatchShards(world.rank - self.servers, 1, workers)

    def evaluation_shards(self, world: World) -> BatchShards:
        """Deal them to all ranks, or to those alone that the run does not outlive."""
        self.check_world_size(world.world_size)
        total = self.servers if self.asynchronous else world.world_size
        return BatchShards(world.rank, 1, total) if world.rank < total else BatchShards.none(total)

    def check(self, request: "Request") -> None:
        """Refuse what needs gradients, or the scale of a loss, in one place."""
        if request.trainer.precision == "16-mixed":
            raise RequestError(
                "trainer.precision=16-mixed does not go with strategy=parameter_server: workers and servers would "
                "scale differently. Use bf16-mixed, or strategy=ddp."
            )
        if request.run.check is not None:
            raise RequestError(
                f"check={request.run.check} does not go with strategy=parameter_server: no worker has the gradients of "
                f"the whole step. Leave it out."
            )
        if request.run.tune == "batch_size":
            raise RequestError(
                "tune=batch_size does not go with strategy=parameter_server: its trials are steps of ranks alone, and "
                "the first ones serve. Use strategy=ddp."
            )

    def check_dry_run(self, device_type: str, gpus: int) -> None:
        """Refuse: what falls to a rank is not known beforehand."""
        raise RequestError("plan=true does not know what strategy=parameter_server exchanges. Use strategy=ddp.")
