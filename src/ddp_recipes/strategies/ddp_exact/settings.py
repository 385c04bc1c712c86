"""What ``strategy=ddp_exact`` means for the shape of a run."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ddp_recipes.config.keys import Count
from ddp_recipes.config.parallelism import ModelLayout
from ddp_recipes.strategies.fixed_shards import FixedShardsSettings


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
