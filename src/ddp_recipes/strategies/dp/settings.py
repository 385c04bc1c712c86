"""What ``strategy=dp`` means for the shape of a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.devices import HOST
from ddp_recipes.errors import RequestError

if TYPE_CHECKING:
    from ddp_recipes.config.request import Request


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings(StrategySettings):
    """One process, which drives all of its GPUs."""

    name: ClassVar[str] = "dp"
    max_world_size: ClassVar[int | None] = 1
    for_more_processes: ClassVar[str] = "Use strategy=ddp for more."

    def check(self, request: "Request") -> None:
        """Refuse a compiled model, whose copies would call the first one."""
        if request.trainer.compile:
            raise RequestError(
                f"trainer.compile={str(request.trainer.compile).lower()} does not go with strategy=dp, which copies "
                f"the model to every GPU in each step. Leave it out, or choose strategy=ddp."
            )

    def check_dry_run(self, device_type: str, gpus: int) -> None:
        """Refuse several GPUs."""
        if device_type != HOST and gpus > 1:
            raise RequestError(
                "plan=true does not know strategy=dp on several GPUs, where one process drives them all. Use "
                "strategy=ddp."
            )
