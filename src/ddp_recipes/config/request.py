"""What a run is asked to be, checked as far as that needs no torch: the parent does it before anything starts."""

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from omegaconf import Container, DictConfig, Node, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_recipes._compat.messages import missing_interpolation_key
from ddp_recipes._compat.omegaconf_ import register_resolver
from ddp_recipes.config.settings import (
    CheckpointSettings,
    ClusterSettings,
    DataSettings,
    LauncherSettings,
    ModelSettings,
    PipelineSettings,
    ResumeSettings,
    RunSettings,
    SlurmSettings,
    TrainerSettings,
    parse,
)
from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.runtime.world import World

GROUPS = ("data", "model", "task", "optimizer", "scheduler", "strategy", "launcher", "trainer", "logger", "checkpoint")


@dataclass(frozen=True)
class Request:
    """The checked keys of a config, and the layout of processes that follows from them."""

    run: RunSettings
    data: DataSettings
    trainer: TrainerSettings
    checkpoint: CheckpointSettings
    launcher: LauncherSettings
    resume: ResumeSettings
    model: ModelSettings
    cluster: ClusterSettings
    single_process: bool  # the strategy runs in one process
    shards: int | None  # parts that the strategy cuts each batch into, where it does
    pipeline: PipelineSettings | None  # where the strategy cuts the model over processes

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Request":
        """Check a resolved config.

        Raises:
            RequestError: a section, key or value is not allowed.
        """
        for group in GROUPS:
            if not isinstance(config.get(group), Mapping):
                raise RequestError(
                    f"The config has no section {group}. Choose an option of the group, e.g. in the defaults "
                    f"list of your primary config (conf/train.yaml lists them all)."
                )
        shards = config["strategy"].get("shards")
        if shards is not None and (type(shards) is not int or shards < 1):
            raise RequestError(f"strategy.shards={shards} is not allowed. Allowed: a whole number at least 1.")
        request = cls(
            run=parse(RunSettings, "", config, others=True),
            data=parse(DataSettings, "data", config["data"], others=True),
            trainer=parse(TrainerSettings, "trainer", config["trainer"]),
            checkpoint=parse(CheckpointSettings, "checkpoint", config["checkpoint"]),
            launcher=parse(
                SlurmSettings if config["launcher"].get("name") == "slurm" else LauncherSettings,
                "launcher",
                config["launcher"],
            ),
            resume=parse(ResumeSettings, "resume", config.get("resume", {"strict": True})),
            model=parse(ModelSettings, "model", asdict(ModelSettings()) | dict(config["model"]), others=True),
            cluster=parse(ClusterSettings, "cluster", asdict(ClusterSettings()) | dict(config.get("cluster") or {})),
            single_process=config["strategy"].get("processes") == 1,
            shards=shards,
            pipeline=_pipeline(config["strategy"]),
        )
        if request.pipeline is None:
            request.model.check_split(request.model.num_devices, "model.num_devices")
        else:
            request._check_pipeline(request.pipeline)
        if request.model.micro_batches > 1 and config["strategy"].get("sync_batchnorm"):
            raise RequestError(
                f"model.micro_batches={request.model.micro_batches} and strategy.sync_batchnorm=true do not go "
                f"together: ranks may have different numbers of micro-batches, and would wait for each other's "
                f"statistics. Leave out one of them."
            )
        return request

    def _check_pipeline(self, pipeline: PipelineSettings) -> None:
        """Refuse what does not go together with stages in several processes."""
        self.model.check_split(pipeline.stages, "strategy.stages")
        refused = {
            f"model.num_devices={self.model.num_devices}": (self.model.num_devices > 1, "each stage has one device"),
            f"model.micro_batches={self.model.micro_batches}": (
                self.model.micro_batches > 1,
                "batches are cut by strategy.micro_batches",
            ),
            "trainer.precision=16-mixed": (
                self.trainer.precision == "16-mixed",
                "stages would scale their gradients differently; use bf16-mixed",
            ),
            "trainer.compile=true": (self.trainer.compile, "a process runs a part of the model"),
            f"check={self.run.check}": (self.run.check is not None, "no process has the gradients of the whole model"),
        }
        for given, (there, reason) in refused.items():
            if there:
                raise RequestError(f"{given} does not go with strategy=ddp_pipeline: {reason}. Leave it out.")
        if self.data.global_batch_size is None and self.data.batch_size % pipeline.micro_batches:
            size = -(-self.data.batch_size // pipeline.micro_batches) * pipeline.micro_batches
            raise RequestError(
                f"data.batch_size={self.data.batch_size} cannot be cut into strategy.micro_batches="
                f"{pipeline.micro_batches} equal parts. Use data.batch_size={size}, or another number of micro-"
                f"batches. (The last batch of an epoch may be smaller.)"
            )

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.model.num_devices

    def device_type(self, gpus: int) -> str:
        """Return ``cuda`` or ``cpu`` for a machine with so many GPUs.

        Raises:
            RequestError: GPUs are asked for and there are none, or NCCL on a CPU.
        """
        device = self.launcher.device
        if device == "cuda" and gpus == 0:
            raise RequestError(
                "launcher.device=cuda, but no GPU is visible on this machine. Use launcher.device=cpu (or auto), "
                "or check CUDA_VISIBLE_DEVICES and the driver (nvidia-smi)."
            )
        device = "cuda" if device == "cuda" or (device == "auto" and gpus) else "cpu"
        if device == "cpu" and self.launcher.backend == "nccl":
            raise RequestError(
                "launcher.backend=nccl needs GPUs, and none is visible. Use launcher.backend=gloo, or auto."
            )
        return device

    def processes(self, gpus: int) -> int:
        """Return how many local processes to start on a machine with so many GPUs.

        Raises:
            RequestError: they do not fit, or the strategy is one of a single process.
        """
        asked, k = self.launcher.nproc_per_node, self.num_devices
        if self.launcher.nnodes > 1:
            raise RequestError(
                f"launcher.nnodes={self.launcher.nnodes}, but the local launcher starts processes on this "
                f"machine only. Start train.py with torchrun on each node, or use launcher=slurm; both take the same "
                f"overrides."
            )
        if self.single_process and asked not in ("auto", 1):
            raise RequestError(
                f"launcher.nproc_per_node={asked}, but this strategy runs in one process. Use strategy=ddp for more."
            )
        on_gpu = self.device_type(gpus) == "cuda"
        if on_gpu and k * (1 if asked == "auto" else int(asked)) > gpus:
            raise RequestError(
                f"{'One replica' if asked == 'auto' else f'{asked} replicas'} of {k} device(s) (model.num_devices) "
                f"cannot run on {gpus} visible GPU(s): {gpus // k} fit(s). Use "
                f"launcher.nproc_per_node={max(gpus // k, 1)}"
                f"{'' if gpus >= k else ' on a machine with more GPUs'}, or launcher.device=cpu."
            )
        auto = 1 if self.single_process else gpus // k if on_gpu else 2
        if self.pipeline is not None:
            auto = max(1, auto // self.pipeline.processes if on_gpu else 1) * self.pipeline.processes
            if on_gpu and auto > gpus:
                raise RequestError(
                    f"One replica of strategy.stages={self.pipeline.stages} takes {self.pipeline.processes} GPUs, one "
                    f"a process, and {gpus} are visible. Use fewer stages, or launcher.device=cpu."
                )
        processes = auto if asked == "auto" else int(asked)
        if self.pipeline is not None:
            refuse_uneven_pipelines(self.pipeline, processes)
        if self.shards is not None:
            refuse_uneven(self.shards, processes)
        return processes

    def layout(self, gpus: int) -> "Layout":
        """Return what ``plan=true`` plans for, seen from a machine with so many GPUs.

        Raises:
            RequestError: a run could not be there.
        """
        launcher, cluster = self.launcher, self.cluster
        if cluster.gpus_per_node is not None:
            gpus = cluster.gpus_per_node
        elif isinstance(launcher, SlurmSettings) and launcher.gpus_per_node is not None:
            gpus = launcher.gpus_per_node
        if launcher.device == "cuda" and gpus == 0:
            raise RequestError(
                "launcher.device=cuda, but cluster.gpus_per_node=0"
                f"{'' if cluster.gpus_per_node == 0 else ', as on this machine'}. State the GPUs of a node "
                "(cluster.gpus_per_node=8, say), or use launcher.device=cpu."
            )
        on_node = replace(self, launcher=replace(launcher, nnodes=1), shards=None, pipeline=None)
        processes, device_type = on_node.processes(gpus), self.device_type(gpus)
        nnodes = cluster.nnodes or launcher.nnodes
        if self.pipeline is not None:  # whose replicas may span nodes
            k = self.pipeline.processes
            if launcher.nproc_per_node == "auto" and device_type == "cpu":
                processes = k
            elif launcher.nproc_per_node == "auto" and nnodes * processes % k and processes > k:
                processes -= processes % k
            refuse_uneven_pipelines(self.pipeline, nnodes * processes)
        world = World(world_size=1 if self.single_process else nnodes * processes, local_world_size=processes)
        return Layout(nnodes, gpus, device_type, world)


@dataclass(frozen=True)
class Layout:
    """The nodes of a run on paper, and its ranks: as many on each node, rank by rank.

    Attributes:
        gpus: of a node; there may be more than are used, and some with ``device_type=cpu``.
        world: as rank 0 sees it.
    """

    nnodes: int
    gpus: int
    device_type: str
    world: World


def _pipeline(strategy: Mapping[str, Any]) -> PipelineSettings | None:
    """Return the keys of a strategy that cuts the model over processes."""
    if "stages" not in strategy:
        return None
    names = [field.name for field in fields(PipelineSettings)]
    known = {name: value for name, value in strategy.items() if name not in ("_target_", "processes")}
    return parse(PipelineSettings, "strategy", dict.fromkeys(names) | known)


def refuse_uneven_pipelines(pipeline: PipelineSettings, processes: int) -> None:
    """Refuse a number of processes that makes no whole number of replicas.

    Raises:
        RequestError: says which numbers do.
    """
    if processes % pipeline.processes:
        k = pipeline.processes
        raise RequestError(
            f"strategy.stages={pipeline.stages} takes {k} processes for each replica, and {processes} cannot be dealt "
            f"evenly. Use {k}, {2 * k}, {3 * k}, … processes (launcher.nproc_per_node), or another number of stages."
        )


def refuse_uneven(shards: int, processes: int) -> None:
    """Refuse a number of processes that does not divide the shards.

    Raises:
        RequestError: lists those that do.
    """
    if shards % processes:
        sizes = ", ".join(str(size) for size in range(1, shards + 1) if shards % size == 0)
        raise RequestError(
            f"strategy.shards={shards} cannot be dealt evenly to {processes} processes. Use {sizes} processes "
            f"(launcher.nproc_per_node), or other shards, which then give other weights."
        )


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain data with every interpolation resolved, but for what comes from the environment.

    ``${oc.env:…}`` stays as it is, also inside other text: each rank resolves it when it uses it, so a
    secret reaches no file and no other process.

    Raises:
        RequestError: a value is missing, or an interpolation has no target.
    """
    if missing := list(_missing(OmegaConf.to_container(config))):
        them = "it" if len(missing) == 1 else "them"
        raise RequestError(f"{', '.join(missing)} must be given: this choice has no default for {them}.")
    with _environment_kept():
        try:
            plain = OmegaConf.to_container(config, resolve=True)
        except InterpolationKeyError as error:
            raise _unfit(config, error) from None
        except OmegaConfBaseException as error:
            raise RequestError(f"{error.full_key}: {_first_line(error)}") from None
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _missing(config: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys without a value."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _missing(value, f"{key}.{name}" if key else str(name))
    elif config == "???":
        yield key


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Let ``oc.env`` give back its own text, and ``oc.decode`` leave such text alone, while inside."""

    def env(*arguments: Any) -> str:
        return "${oc.env:" + ",".join("null" if value is None else str(value) for value in arguments) + "}"

    def decode(text: str | None, _parent_: Container, _node_: Node) -> Any:
        if text is not None and "${oc.env:" in text:
            return "${oc.decode:" + text + "}"
        return oc.decode(text, _parent_, _node_)

    register_resolver("oc.env", env, replace=True)
    register_resolver("oc.decode", decode, replace=True)
    try:
        yield
    finally:
        register_resolver("oc.env", oc.env, replace=True)
        register_resolver("oc.decode", oc.decode, replace=True)


def _unfit(config: DictConfig, error: InterpolationKeyError) -> RequestError:
    """Say which choice needs what the other one does not have: an image model on a table, say."""
    wanted = missing_interpolation_key(error) or _first_line(error)
    section = wanted.split(".")[0]
    have = [f"{section}.{name}" for name in config[section]] if section in config else [str(name) for name in config]
    return RequestError(
        f"{error.full_key} follows {wanted}, which this choice of {section} does not have.{nearest(wanted, have)} "
        f"Choose another {section}, or set {error.full_key} yourself."
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def visible_gpus() -> int:
    """Return the number of CUDA devices this process may use, asking the driver itself: torch need not be loaded."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
