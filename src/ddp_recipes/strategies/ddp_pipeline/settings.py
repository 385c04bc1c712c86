"""What ``strategy=ddp_pipeline`` means for the shape of a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ddp_recipes.config.keys import Count, MicroBatches, Range
from ddp_recipes.config.parallelism import Kind, ModelLayout, PipelineShape, StrategySettings
from ddp_recipes.errors import RequestError

if TYPE_CHECKING:
    from ddp_recipes.config.request import Request


@dataclass(frozen=True, kw_only=True)
class DDPPipelineSettings(StrategySettings):
    """Several processes a replica, one for each stage or more of the model.

    Attributes:
        stages: that the model is cut into.
        micro_batches: that a replica's batch is cut into.
        stages_per_process: more than one with ``interleaved_1f1b`` only; ``None``: 1, or 2 with that.
    """

    name: ClassVar[str] = "ddp_pipeline"
    sends: ClassVar[bool] = True
    kind: ClassVar[Kind] = "staged"
    pictures: ClassVar[tuple[str, ...]] = ("ddp_recipes.reporting.figures.schedule:leave_schedule",)

    stages: Annotated[int, Range(2)] = 2
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    micro_batches: MicroBatches = 4
    stages_per_process: Count | None = None

    def __post_init__(self) -> None:
        each, interleaved = self.stages_each, self.schedule == "interleaved_1f1b"
        if interleaved != (each > 1):
            raise RequestError(
                f"strategy.schedule={self.schedule} with strategy.stages_per_process={each}: interleaved_1f1b is for "
                f"several stages in a process, gpipe and 1f1b are for one. Choose another schedule, or leave "
                f"strategy.stages_per_process out."
            )
        if self.stages % each or self.processes_per_replica < 2:
            raise RequestError(
                f"strategy.stages={self.stages} with {each} stages in each process (strategy.stages_per_process) "
                f"leaves no {'whole number' if self.stages % each else 'second one'} of processes. Allowed: a multiple "
                f"of {each} from {2 * each} on."
            )
        if self.schedule == "1f1b" and self.micro_batches < self.stages:
            raise RequestError(
                f"strategy.schedule=1f1b needs at least as many micro-batches as stages, and strategy.micro_batches="
                f"{self.micro_batches}, strategy.stages={self.stages}. Use strategy.micro_batches={self.stages} or "
                f"more, or strategy.schedule=gpipe."
            )
        processes = self.processes_per_replica
        rounds = max(1, self.micro_batches // processes)
        if interleaved and self.micro_batches % rounds:
            raise RequestError(
                f"strategy.schedule=interleaved_1f1b sends micro-batches in rounds of at least {processes}, one a "
                f"process, and strategy.micro_batches={self.micro_batches} is no multiple of {rounds} rounds. Use "
                f"strategy.micro_batches={self.micro_batches - self.micro_batches % processes}."
            )

    @property
    def stages_each(self) -> int:
        """Stages of a process."""
        return self.stages_per_process or (2 if self.schedule == "interleaved_1f1b" else 1)

    @property
    def processes_per_replica(self) -> int:
        return self.stages // self.stages_each

    def layout(self, world_size: int) -> ModelLayout:
        """A process of each replica has the same stages."""
        return ModelLayout(self.kind, self.processes_per_replica)

    @property
    def pipeline(self) -> PipelineShape:
        return PipelineShape(
            self.schedule,
            self.stages,
            self.processes_per_replica,
            self.micro_batches,
            "strategy.stages",
            "strategy.micro_batches",
        )

    def rows(self, note: str) -> list[tuple[str, str]]:
        """Return the schedule, and how long processes wait in it."""
        from ddp_recipes.model_parallel.timeline import bubble, cells_of

        waiting = f"processes wait {bubble(cells_of(self.pipeline)):.0%} of the time at best"
        return [("schedule", f"{self.schedule}, {self.micro_batches} micro-batches{note}; {waiting}")]

    def check_world_size(self, world_size: int) -> None:
        """Refuse a number of processes that makes no whole number of replicas; say which numbers do."""
        k = self.processes_per_replica
        if world_size % k:
            raise RequestError(
                f"strategy.stages={self.stages} takes {k} processes for each replica, and {world_size} cannot be dealt "
                f"evenly. Use {k}, {2 * k}, {3 * k}, … processes (launcher.nproc_per_node), or another number of "
                f"stages."
            )
        super().check_world_size(world_size)

    def check(self, request: "Request") -> None:
        """Refuse what does not go together with stages in several processes."""
        request.model.check_split(self.stages, "strategy.stages")
        model, trainer = request.model, request.trainer
        refused = {
            f"model.num_devices={model.num_devices}": (model.num_devices > 1, "each stage has one device"),
            f"model.micro_batches={model.micro_batches}": (
                model.micro_batches > 1,
                "batches are cut by strategy.micro_batches",
            ),
            "trainer.precision=16-mixed": (
                trainer.precision == "16-mixed",
                "stages would scale their gradients differently; use bf16-mixed",
            ),
            f"trainer.compile={str(trainer.compile).lower()}": (
                bool(trainer.compile),
                "a process runs some stages of the model",
            ),
            f"check={request.run.check}": (
                request.run.check is not None,
                "no process has the gradients of the whole model",
            ),
        }
        for given, (there, reason) in refused.items():
            if there:
                raise RequestError(f"{given} does not go with strategy=ddp_pipeline: {reason}. Leave it out.")
        data = request.data
        if data.global_batch_size is None and data.batch_size % self.micro_batches:
            size = -(-data.batch_size // self.micro_batches) * self.micro_batches
            raise RequestError(
                f"data.batch_size={data.batch_size} cannot be cut into strategy.micro_batches={self.micro_batches} "
                f"equal ones. Use data.batch_size={size}, or another number of micro-batches. (The last batch of an "
                f"epoch may be smaller.)"
            )
