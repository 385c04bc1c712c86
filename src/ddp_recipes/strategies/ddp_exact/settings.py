"""What ``strategy=ddp_exact`` means for the shape of a run: batches are cut into as many shards at any world size."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_recipes.config.keys import Count
from ddp_recipes.config.parallelism import BatchShards, ModelLayout, StrategySettings
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class FixedShardsSettings(StrategySettings):
    """As many processes as divide the shards.

    Attributes:
        shards: of a global batch, each a replica in its own right: with its own randomness and its own batch-norm
            statistics. The world size must divide them. ``None``: one a process.
        num_threads: threads of torch's CPU kernels in each rank; ``None`` leaves it to the environment.
    """

    shards: Count | None = None
    num_threads: Count | None = 1

    def check_world_size(self, world_size: int) -> None:
        """Refuse a number of processes that does not divide the shards; list those that do."""
        super().check_world_size(world_size)
        if self.shards is not None and self.shards % world_size:
            sizes = ", ".join(str(size) for size in range(1, self.shards + 1) if self.shards % size == 0)
            raise RequestError(
                f"strategy.shards={self.shards} cannot be dealt evenly to {world_size} processes. Use {sizes} "
                f"processes (launcher.nproc_per_node), or other shards, which then give other weights."
            )

    def batch_shards(self, world: World) -> BatchShards:
        """Return this rank's shards of the fixed number."""
        self.check_world_size(world.world_size)
        shards = self.shards or world.world_size
        return BatchShards(world.rank, shards // world.world_size, shards)

    @property
    def fixed_shards(self) -> int | None:
        """The number of shards of a batch, the same at any world size; ``None`` where it follows the world size."""
        return self.shards

    def check_resume(self, path: object, shards: int | None) -> None:
        """Refuse a checkpoint of other shards."""
        if shards is not None and shards != self.shards:
            raise RequestError(
                f"{path} was trained in {shards} shards, this run has {self.shards or 'one a process'}: it would not "
                f"end with the same weights. Set strategy.shards={shards}, or resume.strict=false to go on all the "
                f"same."
            )


@dataclass(frozen=True, kw_only=True)
class DDPExactSettings(FixedShardsSettings):
    """Always a fixed number of shards."""

    name: ClassVar[str] = "ddp_exact"

    shards: Count = 12

    def layout(self, world_size: int) -> ModelLayout:
        """Every process has the whole model, with buffers that follow all shards."""
        return ModelLayout(same_buffers=True)

    def with_less_memory(self) -> list[dict[str, dict[str, Any]]]:
        """Return the strategy that deals the model to the ranks, with the same bits."""
        keys = {"_target_": "ddp_recipes.strategies.fsdp.FSDP", "shards": self.shards, "num_threads": self.num_threads}
        return [{f"strategy=fsdp strategy.shards={self.shards}": keys}]
