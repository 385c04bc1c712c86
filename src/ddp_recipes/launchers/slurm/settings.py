"""The keys of ``launcher=slurm``. Loads no torch and no submitit."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ddp_recipes.config.keys import Count, Range
from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=slurm``."""

    name: Literal["slurm"]
    gpus_per_node: Count | None
    cpus_per_task: Count | None
    time_min: Count
    partition: str | None
    account: str | None
    sbatch: dict[str, Any]
    wait: bool
    signal_s: Annotated[int, Range(1, 65535)]
    requeue: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_restarts", "replace_ranks"):
            if number := getattr(self, name):
                raise RequestError(
                    f"launcher.{name}={number} is not taken by launcher=slurm. Leave it 0: with launcher.requeue=true "
                    f"Slurm starts the job again after a preemption or the loss of a node."
                )
        if self.signal_s + 60 >= 60 * self.time_min:  # Slurm may send it a minute early
            raise RequestError(
                f"launcher.signal_s={self.signal_s} leaves no time to train in launcher.time_min={self.time_min}. "
                f"Allowed: more than a minute less than the job's time."
            )

        lines = {"partition": self.partition, "account": self.account}
        lines |= {f"sbatch.{name}": f"{name}={value}" for name, value in self.sbatch.items()}
        for name, line in lines.items():
            if not str(line).isprintable():  # the next line of the job's script would be a command
                raise RequestError(f"launcher.{name}={line!r} is not one line of printable text, as Slurm needs it.")

    def gpus_of_node(self) -> int | None:
        return self.gpus_per_node
