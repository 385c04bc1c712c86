"""What a strategy means for the shape of a run: its processes, how the data are dealt, what it refuses. Loads no torch.

Each strategy declares that once, in a settings class of its own beside it. Launchers, data, checkpoints and the dry run
ask the settings, and know no strategy by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ddp_recipes._lazy import published
from ddp_recipes.config.keys import Count, parse
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World

if TYPE_CHECKING:
    from ddp_recipes.config.request import Request


@dataclass(frozen=True)
class BatchShards:
    """The shards of each global batch that a rank computes, one after the other: ``count`` of ``total`` from ``first``.

    Ranks of one replica (the stages of a pipeline) have the same shards. Where a rank has several, ranks take turns:
    what they have done at any time are the first ones.
    """

    first: int
    count: int
    total: int

    @classmethod
    def none(cls, total: int) -> "BatchShards":
        """Return those of a rank that computes none: the one beyond the last is empty."""
        return cls(total, 1, total)

    @property
    def readers(self) -> int:
        """How many ranks, or groups of ranks, read different data."""
        return self.total // self.count

    @property
    def numbers(self) -> range:
        """The shards of this rank."""
        return range(self.first, self.first + self.count * self.readers, self.readers)


Kind = Literal["replicated", "sharded", "staged"]


@dataclass(frozen=True)
class ModelLayout:
    """How the ranks of a run hold its model, and with it the optimizer's state.

    Attributes:
        kind: ``replicated``: each rank has it all, and can run and save it without the others; ``sharded``: each has
            rows of its tensors, and they run it together; ``staged``: each has some blocks, and runs these.
        parts: different ones that ranks have, rank r part r modulo that; those with the same have it alike. 0: what a
            rank has is not all that a new one in its place needs.
        same_buffers: whether batch norms' statistics are the same on every rank, not each one's own.
    """

    kind: Kind = "replicated"
    parts: int = 1
    same_buffers: bool = False

    @property
    def writers(self) -> int:
        """How many ranks, from rank 0 on, save what they have of the model; 0: rank 0 saves all of it."""
        return self.parts if self.kind == "sharded" else 0


@dataclass(frozen=True)
class PipelineShape:
    """A model in stages over the processes of a replica, which work on micro-batches at the same time.

    Attributes:
        stages_key: the key that sets ``stages``, for messages; ``micro_batches_key`` likewise.
    """

    schedule: str
    stages: int
    processes: int
    micro_batches: int
    stages_key: str
    micro_batches_key: str

    @property
    def each(self) -> int:
        """Stages of a process."""
        return self.stages // self.processes

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds."""
        return list(range(rank % self.processes, self.stages, self.processes))


@dataclass(frozen=True)
class Block:
    """A module that runs in one stage."""

    name: str
    time: float  # its fraction of a step
    memory: int  # bytes of weights, gradients, one number of the optimizer's for each, and activations


@dataclass(frozen=True)
class Stage:
    """What one device of a replica holds."""

    blocks: tuple[Block, ...]
    parameters: int  # how many numbers
    time: float | None  # its fraction of a step; None where the dry run failed
    memory: float | None

    @property
    def first(self) -> str:
        """The name of the first block."""
        return self.blocks[0].name

    def __str__(self) -> str:
        last = self.blocks[-1].name
        blocks = self.first if self.first == last else f"{self.first} to {last}"
        costs = "" if self.time is None else f", {self.time:.0%} of the time, {self.memory:.0%} of the memory"
        return f"{blocks}: {self.parameters:,} parameters{costs}"


@dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """The keys of ``strategy.*`` and the arithmetic that follows from them; a base that fits one process a replica.

    A subclass adds its keys as typed fields, with defaults. For the class ``my_module.MyStrategy`` that a yaml names as
    ``_target_`` it is ``my_module.MyStrategySettings``, or the class's attribute ``Settings``. The settings are the
    only argument that the strategy is made with.

    Attributes:
        name: in logs and summaries; left out, the class's own.
        pictures: functions, as ``module:name``, that draw for the run directory: they take it, the logger and these
            settings.
        max_world_size: the most processes that a run can have; ``None``: any number.
        for_more_processes: what to do where more are wanted.
        backend: the only one that it works with, where ranks exchange copies on the CPU; ``None``: any that takes
            tensors on the run's devices.
        sends: whether a rank sends tensors on its device to another one alone, beside collectives.
        kind: how ranks hold the model, as in :class:`ModelLayout`.
        deferred: whether the model is made without memory for its large tensors, which get it, and values, once
            sharded.
        processes: the world size that the run must have; ``None`` leaves it to the launcher.
    """

    name: ClassVar[str] = ""
    pictures: ClassVar[tuple[str, ...]] = ()
    max_world_size: ClassVar[int | None] = None
    for_more_processes: ClassVar[str] = "Use another strategy for more."
    backend: ClassVar[str | None] = None
    sends: ClassVar[bool] = False
    kind: ClassVar[Kind] = "replicated"
    deferred: ClassVar[bool] = False

    processes: Count | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.__dict__.get("name") or cls.__name__.removesuffix("Settings")

    def rows(self, note: str) -> list[tuple[str, str]]:
        """Return more lines for the table at a run's start; ``note`` is what to say of micro-batches."""
        return []

    # --- processes

    @property
    def processes_per_replica(self) -> int:
        """Processes that hold one replica together."""
        return 1

    def check_world_size(self, world_size: int) -> None:
        """Refuse a number of processes that the strategy cannot have.

        Raises:
            RequestError: says which numbers it can.
        """
        if self.max_world_size is not None and world_size > self.max_world_size:
            raise RequestError(
                f"launcher.nproc_per_node={world_size} (over all nodes), but this strategy runs in "
                f"{'one process' if self.max_world_size == 1 else f'{self.max_world_size} at most'}. "
                f"{self.for_more_processes}"
            )
        if self.processes is not None and world_size != self.processes:
            raise RequestError(
                f"strategy.processes={self.processes}, but {world_size} process(es) are to run. Set "
                f"launcher.nproc_per_node (and launcher.nnodes) so that there are {self.processes}, or leave "
                f"strategy.processes out."
            )
        if world_size % self.processes_per_replica:
            k = self.processes_per_replica
            raise RequestError(
                f"One replica takes {k} processes, and {world_size} cannot be dealt evenly. Use {k}, {2 * k}, {3 * k}, "
                f"… processes (launcher.nproc_per_node)."
            )

    def auto_processes(self, fit: int | None) -> int:
        """Return how many processes ``launcher.nproc_per_node=auto`` stands for on one node.

        Args:
            fit: how many there are GPUs for; ``None`` on the CPU.
        """
        wanted = 2 if fit is None else fit
        if self.processes is not None:
            wanted = self.processes
        elif self.max_world_size is not None:
            wanted = min(wanted, self.max_world_size)
        k = self.processes_per_replica
        return wanted if k == 1 else max(1, 1 if fit is None else wanted // k) * k

    def outlives(self, rank: int) -> bool:
        """Whether a run that has begun goes on without this rank, if its process dies."""
        return False

    def needs_all(self, world_size: int) -> bool:
        """Whether a run that has begun ends with any rank that dies."""
        return not any(map(self.outlives, range(world_size)))

    # --- data

    def batch_shards(self, world: World) -> BatchShards:
        """Return which shards of each global batch a rank computes.

        Raises:
            RequestError: this world size cannot be.
        """
        self.check_world_size(world.world_size)
        k = self.processes_per_replica
        return BatchShards(world.rank // k, 1, world.world_size // k)

    def evaluation_shards(self, world: World) -> BatchShards:
        """Return which shards of each batch a rank computes where nothing is trained."""
        return self.batch_shards(world)

    @property
    def fixed_shards(self) -> int | None:
        """Shards of a batch that do not follow from the world size; ``None`` where they do."""
        return None

    def exchanges(self, world: World) -> bool:
        """Whether gradients go from rank to rank, or from shard to shard, so that who has which is settled before."""
        return world.world_size > 1 or self.fixed_shards is not None or self.kind != "replicated"

    def check_resume(self, path: object, shards: int | None) -> None:
        """Refuse a checkpoint that was trained in so many fixed shards, where this run would end with other weights.

        Raises:
            RequestError: with what to set.
        """

    # --- the model

    @property
    def pipeline(self) -> PipelineShape | None:
        """The stages that a replica's processes hold; ``None`` where each process holds the whole model."""
        return None

    def layout(self, world_size: int) -> ModelLayout:
        """Return how so many ranks hold the model."""
        return ModelLayout(self.kind, int(world_size == 1))

    # --- refusals and remedies

    def check(self, request: "Request") -> None:
        """Refuse what does not go together with keys of other groups.

        Raises:
            RequestError: with what to do instead.
        """

    def check_dry_run(self, device_type: str, gpus: int) -> None:
        """Refuse what a dry run cannot show.

        Raises:
            RequestError: with what to do instead.
        """

    def with_less_memory(self) -> Sequence[Mapping[str, Mapping[str, Any]]]:
        """Return keys of the strategy with which a rank may take less memory, by the overrides that set them.

        Of each kind those that change least come first; with a ``_target_`` they are all keys of another strategy. A
        dry run that does not fit tries them: the first kind before changes of model and batch, the second one last.
        """
        return ()

    @property
    def synchronises_batch_norm(self) -> bool:
        """Whether batch norm takes its statistics from all replicas."""
        return False

    @property
    def rounds_gradients(self) -> bool:
        """Whether ranks exchange gradients in 16 bits."""
        return False

    def batch_norm_remedy(self, device_type: str) -> str:
        """Return what to set so that batch norm takes its statistics from all replicas; empty if nothing does."""
        return ""

    def unused_parameters(self) -> str:
        """Return what parameters that the loss does not depend on lead to, and what to do; empty if nothing."""
        return ""


def strategy_settings(section: Mapping[str, Any]) -> StrategySettings:
    """Return the checked settings of the strategy that a config section names as its ``_target_``.

    Raises:
        RequestError: there is no such strategy, or a key or value is not allowed.
    """
    target = section.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise RequestError(
            "strategy has no _target_, the dotted name of a strategy class. Choose an option of the group "
            "(conf/strategy lists them)."
        )
    values = {str(name): value for name, value in section.items() if not str(name).startswith("_")}
    return parse(_settings_class(target), "strategy", values)


def _settings_class(target: str) -> type[StrategySettings]:
    """Return the settings class of a strategy; where it lies beside the strategy, that one need not be loaded."""
    module_name, _, name = target.rpartition(".")
    try:
        module = import_module(module_name)
        found = getattr(module, f"{name}Settings", None)
        if found is None:
            found = getattr(getattr(module, name), "Settings", None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # of something that the user's own module imports
        raise RequestError(f"strategy._target_={target} cannot be found: there is no module {error.name}.") from None
    except AttributeError:
        raise RequestError(
            f"strategy._target_={target} cannot be found: {module_name} has no {name}.{_strategies_in(module_name)}"
        ) from None
    if not (isinstance(found, type) and issubclass(found, StrategySettings)):
        raise RequestError(
            f"strategy._target_={target} has no settings. Define {name}Settings, a frozen dataclass that is a subclass "
            f"of ddp_recipes.StrategySettings, beside it: it says what the strategy means for the processes of a run."
        )
    return found


def _strategies_in(module: str) -> str:
    listed: Sequence[str] = [*getattr(import_module(module), "__all__", ()), *published(module)]
    names = sorted({name for name in listed if not name.endswith("Settings")})
    return f" It has: {', '.join(names)}." if names else ""
