"""The recipe's own keys as frozen dataclasses, for :func:`~ddp_recipes.config.keys.parse`. Loads no torch.

Also which launcher a config leads to, and which way a metric gets better, by its name.
"""

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal

from ddp_recipes.config.keys import Count, Fraction, MicroBatches, Natural, Positive, Range, Seconds, parse
from ddp_recipes.devices import HOST, refuse_on_host
from ddp_recipes.errors import RequestError, nearest, not_one_of

RANKS_PER_CORE = 16
Limit = Fraction | Natural  # a float is a fraction of the batches, an int a number of them


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The keys of ``model.*`` that are not the model's own: how a replica spans devices, what it keeps and trains."""

    num_devices: Count = 1
    split: Literal["auto", "timed"] | list[str | int] | None = None
    micro_batches: MicroBatches = 1
    freeze: str | list[str] | None = None
    activation_checkpointing: bool | str | list[str] = False

    def check_split(self, stages: int, key: str) -> None:
        """Refuse names that do not make so many stages, as ``key`` says.

        Raises:
            RequestError: there are too many or too few.
        """
        if isinstance(self.split, list) and len(self.split) + 1 != stages:
            names = ", ".join(map(str, self.split))
            one_a_device = ", one a device," if key == "model.num_devices" else ""
            raise RequestError(
                f"model.split=[{names}] makes {len(self.split) + 1} stages{one_a_device} and {key}={stages}. Each name "
                f"begins the next stage: give {stages - 1} name(s), or set {key}={len(self.split) + 1}."
            )


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """``trainer.*``: limits, cadence, precision."""

    max_epochs: Annotated[int, Range(-1)] | None
    max_steps: Annotated[int, Range(-1)] | None
    max_time: str | Annotated[float, Range(0)] | None
    log_every_n_steps: Count
    val_check_interval: Annotated[float, Range(1e-6, 1)] | Count
    check_val_every_n_epoch: Count
    num_sanity_val_steps: Annotated[int, Range(-1)]
    limit_train_batches: Limit
    limit_val_batches: Limit
    limit_test_batches: Limit
    limit_predict_batches: Limit
    overfit_batches: Limit
    fast_dev_run: bool | Natural
    accumulate_grad_batches: Count
    gradient_clip_val: Annotated[float, Range(0)] | None
    gradient_clip_algorithm: Literal["norm", "value"]
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
    deterministic: bool
    detect_anomaly: bool
    compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    compile_blocks: bool | str | list[str] = False
    compile_dynamic: bool | None = None
    channels_last: bool = False
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    benchmark: bool | None = None
    peak_flops: Literal["auto"] | Positive | None = None
    fast_paths: bool = True
    progress: Literal["auto", "bar", "lines"] | bool

    def __post_init__(self) -> None:
        if _unlimited(self.max_epochs) and _unlimited(self.max_steps) and self.max_time is None:
            raise RequestError(
                "trainer.max_epochs, trainer.max_steps and trainer.max_time are all unlimited: set one of them."
            )
        seconds(self.max_time)
        if not self.compile and (self.compile_blocks or self.compile_dynamic is not None):
            raise RequestError(
                "trainer.compile_blocks and trainer.compile_dynamic say how a model is compiled, and trainer.compile="
                "false. Set trainer.compile=true, or leave them out."
            )
        if self.deterministic and str(self.compile).startswith("max-autotune"):
            raise RequestError(
                f"trainer.compile={self.compile} picks kernels by what they take, which differs from start to start, "
                f"and trainer.deterministic=true asks for the same ones. Set trainer.compile=true, or leave out one."
            )
        if self.benchmark and self.deterministic:
            raise RequestError(
                "trainer.benchmark=true picks kernels by what they take, which differs from start to start, and "
                "trainer.deterministic=true asks for the same ones: leave out one."
            )

    def effective(self) -> "TrainerSettings":
        """Return what the loop runs with: ``fast_dev_run``, ``overfit_batches``, no clipping and -1 spelled out."""
        clip_val = self.gradient_clip_val or None  # of 0, as in Lightning
        if self.fast_dev_run:
            n = int(self.fast_dev_run)
            limits: dict[str, Any] = {f"limit_{part}_batches": n for part in ("train", "val", "test", "predict")}
            return dataclasses.replace(
                self,
                **limits,
                max_epochs=1,
                max_steps=n,
                num_sanity_val_steps=0,
                val_check_interval=1.0,
                check_val_every_n_epoch=1,
                log_every_n_steps=1,
                overfit_batches=0,
                gradient_clip_val=clip_val,
            )
        return dataclasses.replace(
            self,
            max_epochs=None if _unlimited(self.max_epochs) else self.max_epochs,
            max_steps=None if _unlimited(self.max_steps) else self.max_steps,
            limit_train_batches=self.overfit_batches or self.limit_train_batches,
            gradient_clip_val=clip_val,
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """``checkpoint.*``: when a checkpoint is saved and which ones are kept."""

    enabled: bool
    every_n_steps: Count | None
    every_n_epochs: Count | None
    monitor: str | None
    mode: Literal["auto", "min", "max"]
    save_top_k: Annotated[int, Range(-1)]
    save_last: bool
    async_save: bool
    in_memory_every_n_steps: Count | None = None

    @property
    def auto_monitor(self) -> bool:
        """Whether the metric to monitor is the loss that there is."""
        return self.monitor in (None, "auto")


@dataclass(frozen=True, kw_only=True)
class LauncherSettings:
    """``launcher.*``, the keys of every launcher: how many ranks, on what. Each adds its own in a subclass."""

    name: str
    nproc_per_node: Literal["auto"] | Count
    nnodes: Count
    max_restarts: Natural
    replace_ranks: Natural = 0
    start_method: Literal["forkserver", "spawn"]
    timeout_s: Seconds
    backend: str
    device: str
    init_method: str | None
    require_key: bool = False
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        if self.device == HOST:
            refuse_on_host(self.backend)
        if self.init_method is not None and not self.init_method.startswith(("file:///", "tcp://")):
            raise RequestError(
                f"launcher.init_method={self.init_method} is no rendezvous address. "
                f"Allowed: file:///an/absolute/path, tcp://host:port, or null for a free port of our own."
            )

    def check_processes(self, processes: int) -> None:
        """Refuse to start so many ranks on this machine's cores as to stop it, unless that is asked for."""
        cores = len(os.sched_getaffinity(0))
        if processes > (most := max(64, RANKS_PER_CORE * cores)) and not self.oversubscribe:
            raise RequestError(
                f"launcher.nproc_per_node={processes}, and {cores} core(s) are here, on which {most} ranks are started "
                f"at most. Give fewer, or launcher.oversubscribe=true."
            )

    def gpus_of_node(self) -> int | None:
        """Return how many GPUs of each node are requested, where the launcher does that."""
        return None


@dataclass(frozen=True, kw_only=True)
class AutoSettings(LauncherSettings):
    """``launcher.*`` of ``launcher=auto``; another ``name`` chooses that launcher."""

    name: Literal["auto", "local", "env", "slurm", "nodes"]


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """``data.*``: how a data set is cut into batches. Sizes and the sets themselves are read by the recipe."""

    batch_size: Count
    global_batch_size: Count | None
    val_batch_size: Count
    num_workers: Natural
    pin_memory: bool
    drop_last: bool
    shuffle: bool
    shard: Literal["contiguous", "strided"]
    collate_fn: str | dict[str, Any] | None = None
    weights: str | dict[str, Any] | list[Annotated[float, Range(0)]] | None = None
    persistent_workers: bool | None = None
    prefetch_factor: Count | None = None
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    timeout: Positive | None = None
    shard_arguments: str | dict[str, str] | None = None
    replay: bool = False
    sampler: dict[str, Any] | None = None
    batch_sampler: dict[str, Any] | None = None
    group_by_length: bool | str | dict[str, Any] | list[Annotated[float, Range(0)]] = False

    def __post_init__(self) -> None:
        for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"):
            if getattr(self, name) and not self.num_workers:
                raise RequestError(
                    f"data.{name}={str(getattr(self, name)).lower()} is for worker processes, but data.num_workers=0. "
                    f"Set data.num_workers to at least 1, or leave out data.{name}."
                )
        given = self.shard_arguments
        if not (given in (None, "own") or (isinstance(given, dict) and {"world", "rank"} <= {*given.values()})):
            raise RequestError(
                f"data.shard_arguments={given} does not say how a stream is sharded. Allowed: null, own, or names of "
                f"arguments, as {{num_shards: world, index: rank}}, with _method_: shard where a method takes them."
            )
        if self.weights is not None and not self.shuffle:
            raise RequestError(
                "data.weights draws samples at random, data.shuffle=false takes them in their order. Leave out one."
            )
        if self.group_by_length and not self.shuffle:
            raise RequestError(
                "data.group_by_length puts samples of like length in a batch, data.shuffle=false takes them in their "
                "order. Leave out one."
            )
        if len(drawn := [name for name in ("weights", "sampler", "batch_sampler") if getattr(self, name)]) > 1:
            raise RequestError(f"data.{drawn[0]} and data.{drawn[1]} each say which samples come. Leave out one.")
        if self.batch_sampler and (self.group_by_length or self.drop_last):
            other = "drop_last" if self.drop_last else "group_by_length"
            raise RequestError(f"data.batch_sampler says which samples are a batch: leave out data.{other}.")


@dataclass(frozen=True, kw_only=True)
class ResumeSettings:
    """``resume.*``: what a run may change that goes on from a checkpoint."""

    strict: bool


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """``sweep.*``: what becomes of a sweep when one of its jobs fails."""

    on_failure: Literal["continue", "stop"] = "continue"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """``cluster.*``: the machines of a dry run; what is left out is as on this one."""

    nnodes: Count | None = None
    gpus_per_node: Natural | None = None
    gpu_memory_gb: Positive | None = None
    interconnect_gbps: Positive | None = None


Mode = Literal["fit", "validate", "test", "predict", "export"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The keys that belong to no group."""

    seed: Annotated[int, Range(0, 2**63 - 1)]
    mode: Mode
    ckpt_path: str | None
    weights_from: str | None = None
    plan: bool
    check: Literal["equivalence"] | None
    check_steps: Count
    check_tolerance: Annotated[float, Range(0)] | None
    tune: Literal["lr", "batch_size"] | None = None
    tune_steps: Count | None = None
    trusted_packages: list[str] | None = None

    def __post_init__(self) -> None:
        if self.plan and self.mode != "fit":
            raise RequestError(f"plan=true plans training, but mode={self.mode} is none. Use mode=fit.")
        for other in ("check", "tune", "ckpt_path", "weights_from"):
            if self.plan and getattr(self, other) is not None:
                raise RequestError(
                    f"plan=true plans a run from its start, and runs nothing: leave out {other}={getattr(self, other)}."
                )
        if self.check is not None and self.mode != "fit":
            raise RequestError(f"check={self.check} compares training, but mode={self.mode} is none. Use mode=fit.")
        if self.tune is not None and (self.check, self.ckpt_path, self.mode) != (None, None, "fit"):
            raise RequestError(
                f"tune={self.tune} trains on trial, from the start: leave out check and ckpt_path, and use mode=fit. "
                f"Weights to begin with are weights_from."
            )
        if self.tune == "lr" and self.tune_steps is not None and self.tune_steps < 20:
            raise RequestError(f"tune_steps={self.tune_steps} are too few rates for tune=lr. Allowed: 20 or more.")
        if self.mode == "export" and self.ckpt_path is None and self.weights_from is None:
            raise RequestError("mode=export needs ckpt_path, a run directory or a checkpoint file.")
        if self.weights_from is not None and self.ckpt_path not in (None, "auto"):
            raise RequestError(
                f"ckpt_path={self.ckpt_path} and weights_from={self.weights_from}: a run that resumes has the "
                f"checkpoint's weights. Leave out one of them; with ckpt_path=auto weights_from is for the first start."
            )

    @property
    def work(self) -> str:
        """The command to run: the mode, or ``plan``, ``check`` or ``tune`` in its place."""
        return "plan" if self.plan else self.check or self.tune or self.mode


def seconds(limit: str | float | None) -> float | None:
    """Return a time limit in seconds, given as seconds or as ``"DD:HH:MM:SS"`` (leading parts may be left out)."""
    if limit is None or not isinstance(limit, str):
        return limit
    parts = limit.split(":")
    if len(parts) > 4 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        raise RequestError(f'trainer.max_time={limit} is no time. Allowed: seconds, or "DD:HH:MM:SS".')
    return float(sum(int(part) * unit for part, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False)))


def batches(limit: float, available: int) -> int:
    """Return how many of the available batches a limit lets through: a float is a fraction, an int a number."""
    return min(limit, available) if isinstance(limit, int) else int(limit * available)


def _unlimited(value: int | None) -> bool:
    return value is None or value == -1


AUTO = "ddp_recipes.launchers.AutoLauncher"
BY_NAME = {name: f"ddp_recipes.launchers.{name.title()}Launcher" for name in ("local", "env", "slurm", "nodes")}


def _launcher_target(section: Mapping[str, Any]) -> str:
    """Return the name of a launcher's class; without a ``_target_``, or with ``auto``'s, ``launcher.name`` chooses."""
    target = str(section.get("_target_", AUTO))
    return BY_NAME.get(str(section.get("name")), AUTO) if target == AUTO else target


def launcher_class(section: Mapping[str, Any]) -> Any:
    """Return the class of the launcher that a config leads to.

    Raises:
        RequestError: there is no such class, or it is no launcher.
    """
    module, _, name = (target := _launcher_target(section)).rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(
            f"launcher._target_={target} cannot be imported: {error}. Allowed: the dotted path of a class, such as "
            f"{BY_NAME['local']}, or one in a module that is installed or in the current folder."
        ) from None
    settings = getattr(found, "settings_class", None)
    if not (isinstance(settings, type) and issubclass(settings, LauncherSettings)):
        raise RequestError(
            f"launcher._target_={target} is no launcher: its settings_class is {settings}. Allowed: a subclass of "
            f"ddp_recipes.config.settings.LauncherSettings, whose fields are the keys of launcher.*."
        )
    return found


def launcher_settings(config: Mapping[str, Any]) -> LauncherSettings:
    """Return a config's ``launcher.*``, checked by the settings class of its launcher.

    Raises:
        RequestError: there is no such launcher, or a key or value is not allowed.
    """
    section = config["launcher"]
    settings: type[LauncherSettings] = AutoSettings
    if _launcher_target(section) != AUTO:  # a rank that checks the keys of the default one loads no launcher
        settings = launcher_class(section).settings_class
    return parse(settings, "launcher", {name: value for name, value in section.items() if name != "_target_"})


Direction = Literal["min", "max"]

_LOWER = re.compile("cer|entropy|err|error|fid|loss|mae|mape|mse|nll|perplexity|ppl|rmse|wer")
_HIGHER = re.compile(
    "acc|accuracy|ap|auc|auroc|bleu|dice|f1|iou|jaccard|map|miou|precision|psnr|r2|recall|rouge|specificity|ssim"
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")  # of a name such as MulticlassF1Score


def better(metric: str) -> Direction | None:
    """Return whether a metric is better when it is lower or higher; ``None`` where its name does not tell.

    The last word that tells counts: ``val/f1_loss`` is a loss. So do the words in a class's name, ``BinaryF1Score``.
    """
    for name in reversed(re.split(r"[^A-Za-z0-9]+", metric)):
        for word in (name, *reversed(_WORDS.findall(name))):
            if _LOWER.fullmatch(word.lower()):
                return "min"
            if _HIGHER.fullmatch(word.lower()):
                return "max"
    return None


def resolved(mode: str, metric: str, key: str) -> Direction:
    """Return the mode, ``auto`` resolved by the metric's name.

    Args:
        key: where the mode is set, for messages.

    Raises:
        RequestError: the mode is none, or the name does not tell.
    """
    if mode not in ("auto", "min", "max"):
        raise not_one_of(key, mode, ("auto", "min", "max"))
    found: Direction | None = better(metric) if mode == "auto" else "min" if mode == "min" else "max"
    if found is None:
        raise RequestError(
            f"{key}=auto, and the name {metric} does not tell whether lower or higher is better. Set {key}=min or max."
        )
    return found


def check_measured(monitor: str, metrics: Collection[str], key: str = "checkpoint.monitor") -> None:
    """Refuse a metric to monitor that nothing measures.

    Raises:
        RequestError: lists the metrics there are.
    """
    if monitor not in metrics:
        raise RequestError(
            f"{key}={monitor} is not measured. Measured are: {', '.join(sorted(metrics))}.{nearest(monitor, metrics)}"
        )
