"""What ``strategy=single`` means for the shape of a run."""

from dataclasses import dataclass
from typing import ClassVar

from ddp_recipes.config.parallelism import StrategySettings


@dataclass(frozen=True, kw_only=True)
class SingleSettings(StrategySettings):
    """One process: there is nobody to learn together with."""

    name: ClassVar[str] = "single"
    max_world_size: ClassVar[int | None] = 1
    for_more_processes: ClassVar[str] = "Use strategy=ddp for more."
