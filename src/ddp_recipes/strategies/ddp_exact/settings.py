"""What ``strategy=ddp_exact`` means for the shape of a run."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_recipes.config.keys import Count
from ddp_recipes.strategies.fixed_shards import FixedShardsSettings


@dataclass(frozen=True, kw_only=True)
class DDPExactSettings(FixedShardsSettings):
    """Always a fixed number of shards."""

    name: ClassVar[str] = "ddp_exact"

    shards: Count = 12

    def parts(self, world_size: int) -> int:
        """Every process has the whole model."""
        return 1

    @property
    def same_buffers(self) -> bool:
        """True: buffers follow all shards of a step, so all ranks have the same."""
        return True

    def with_less_memory(self) -> list[dict[str, dict[str, Any]]]:
        """Return the strategy that deals the model to the ranks, with the same bits."""
        keys = {"_target_": "ddp_recipes.strategies.FSDP", "shards": self.shards, "num_threads": self.num_threads}
        return [{f"strategy=fsdp strategy.shards={self.shards}": keys}]
