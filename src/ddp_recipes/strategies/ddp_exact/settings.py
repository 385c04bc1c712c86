"""What ``strategy=ddp_exact`` means for the shape of a run."""

from dataclasses import dataclass
from typing import ClassVar

from ddp_recipes.config.keys import Count
from ddp_recipes.strategies.fixed_shards import FixedShardsSettings


@dataclass(frozen=True, kw_only=True)
class DDPExactSettings(FixedShardsSettings):
    """Always a fixed number of shards."""

    name: ClassVar[str] = "ddp_exact"

    shards: Count = 12
