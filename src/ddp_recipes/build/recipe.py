"""The objects of one run on one rank; the other modules of this folder make them, with plain arguments."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_recipes._version import __version__
from ddp_recipes.build.data import Loading, split_of
from ddp_recipes.build.devices import Devices, available_devices, set_torch_up
from ddp_recipes.build.instantiate import locate, make
from ddp_recipes.build.model import BuiltTask, convert, make_task, refuse_lazy, refuse_sparse
from ddp_recipes.build.observers import logger_sections, make_callbacks, uncalled
from ddp_recipes.callbacks import Callback
from ddp_recipes.checkpointing.files import State, find
from ddp_recipes.config.extras import extra
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import CheckpointSettings, TrainerSettings, check_measured, resolved
from ddp_recipes.data.loader import Loader
from ddp_recipes.devices import fuses_alike
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.job import Job, Regroup
from ddp_recipes.runtime.seeding import seed_everything
from ddp_recipes.runtime.tensors import digest, put_together
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Strategy
from ddp_recipes.tasks import RunContext, Task
from ddp_recipes.tasks.task import outside
from ddp_recipes.training.cadence import Length
from ddp_recipes.training.precision import whole_dtype
from ddp_recipes.training.state import load_part

_ASKED_LATER = {"checkpointer", "cursor", "purge_step", "run"}  # of a checkpoint, once it is loaded


@dataclass
class Recipe:
    """The objects of one run on this rank.

    Attributes:
        request: the checked keys of the job's config.
        loaders: by split; of several sets of one split by ``val/<name>``.
        trainer: its keys as ``fast_dev_run`` and ``overfit_batches`` change them.
        built: the task, and what came of placing its model.
        loggers: the config's sections, by their dotted names.
        checkpoint: its keys, ``auto`` resolved: which metric tells the best one, and which way.
        weights: to start from, but for those of a checkpoint.
        checkpoint_path: what ``state`` was read from, if the run starts from a checkpoint.
        warnings: for the log, once there is one.
    """

    job: Job
    request: Request
    control: Control
    devices: Devices
    trainer: TrainerSettings
    strategy: Strategy
    loaders: Mapping[str, Loader]
    built: BuiltTask
    weights: Mapping[str, Tensor]
    callbacks: Mapping[str, Callback]
    length: Length
    loggers: Mapping[str, Mapping[str, Any]]
    checkpoint: CheckpointSettings
    checkpoint_path: Path | None
    state: State | None
    warnings: list[str]

    @property
    def task(self) -> Task:
        """The module that is trained, with its loss and metrics."""
        return self.built.task

    @property
    def world(self) -> World:
        """The place of this rank among all."""
        return self.devices.world

    @property
    def device(self) -> torch.device:
        """The first device."""
        return self.devices.own[0]

    @property
    def mode(self) -> str:
        """The mode of the run."""
        return self.request.run.mode

    @property
    def facts(self) -> dict[str, str]:
        """Facts that have to be equal on all ranks, by the name that messages call them."""
        sizes = {f"samples of {loader.name}": f"{loader.plan.num_samples:,}" for loader in self.loaders.values()}
        return {"version of ddp_recipes": __version__, "digest of the config": digest(self.job.config)[:12], **sizes}

    @property
    def val(self) -> dict[str, Loader]:
        """The loaders of validation sets, by what their metrics' names begin with."""
        return {name: loader for name, loader in self.loaders.items() if split_of(name) == "val"}

    @property
    def monitor(self) -> str:
        """The metric that tells the best checkpoint."""
        assert self.checkpoint.monitor is not None
        return self.checkpoint.monitor

    @property
    def may_fuse(self) -> bool:
        """Whether an optimizer may be fused, where the config leaves that open.

        Not with 16-mixed: where the very first step is skipped, torch's fused SGD goes on from uninitialised momentum.
        Nor where the same bits are promised on any number of ranks, but on GPUs: the CPU's fused kernels compute the
        last few numbers of a tensor otherwise than the others, so that the bits depend on where it is cut.
        """
        exact = self.request.strategy.fixed_shards is not None
        alike = all(fuses_alike(parameter.device) for parameter in self.task.parameters())
        return self.trainer.precision != "16-mixed" and (alike or not exact)

    @property
    def replicas(self) -> int:
        """How many there are, in all processes."""
        return self.request.strategy.batch_shards(self.world).readers * self.strategy.replicas(self.device.type)

    @property
    def devices_per_replica(self) -> int:
        """How many a replica spans, in one process or several."""
        return self.request.num_devices * self.request.strategy.processes_per_replica

    @property
    def resumes_in_place(self) -> bool:
        """Whether the run goes on with what is in its own run directory."""
        path = self.request.run.ckpt_path
        return self.mode == "fit" and (
            path == "auto"
            or self.job.regroup is not None
            or (self.checkpoint_path is not None and self.checkpoint_path.is_relative_to(self.job.directory))
        )

    def initial_weights(self) -> dict[str, Any]:
        """Return what a run without a checkpoint starts from: tensors, or what their values come of."""
        origins = {name: each.origin() for name, each in self.built.initial.items()}
        return {**self.task.weights(), **origins, **self.weights}

    @property
    def regroup(self) -> Regroup | None:
        """The regroup that this rank joins, if it takes the place of a lost one."""
        return None if self.job.regroup is None else Regroup.of(self.job.regroup)

    def load_weights(self, strategy: Strategy | None = None) -> int:
        """Load the weights to start from, and have the strategy leave this rank its part; return their step."""
        weights = self.weights if self.state is None else self.state["model"]
        in_rows = self.regroup is None or (self.regroup.states and self.strategy.settings.kind == "sharded")
        if weights and not self.built.initial and in_rows:
            self.task.load_weights({**self.task.weights(), **put_together(weights)})
        if strategy is not None:
            strategy.shard(self.task, self.devices.own)
        if self.built.initial:
            from ddp_recipes.build.deferred import materialize

            materialize(self.task, self.built.initial, weights, self.device)
        elif not in_rows:
            load_part(self.task, weights)
        self.built.initial, self.weights = {}, {}  # some are large
        return 0 if self.state is None else int(self.state["cursor"]["step"])

    def forget_state(self) -> None:
        """Leave of a checkpoint that is loaded only what the run still asks for: tensors would stay to its end."""
        state = self.state or {}
        for name in state.keys() - _ASKED_LATER:
            del state[name]


def make_recipe(job: Job, world: World, control: Control) -> Recipe:
    """Return the objects of a run: reads data and builds the model, but starts nothing and writes nothing.

    Raises:
        RequestError: something in the config cannot be made.
    """
    config, request = job.config, Request.of(job.config)
    trainer, mode = request.trainer.effective(), request.run.mode
    devices: Devices = extra("plan=true")(request) if request.run.plan else available_devices(request, world)
    set_torch_up(trainer, devices)
    request.strategy.check_world_size(devices.world.world_size)
    strategy = strategy_of(config["strategy"]["_target_"], request)
    loading = Loading(config["data"], request, devices, strategy)
    loaders: dict[str, Loader] = {}
    seed_everything(request.run.seed)  # a data set may draw what it holds
    if "datamodule" not in config["data"]:
        download = config["data"].get("download", False)
        loaders |= control.first_on_node(loading.loaders) if download else loading.loaders()
    seed_everything(request.run.seed)
    sample, step = next(iter(loaders.values()), None), "training_step" if mode == "fit" else "predict_step"
    times = partial(control.of_main, "times of the model's modules")
    built = make_task(config, request.model, request.strategy, devices, sample, step, trainer, times)
    strategy.starts = built.starts
    callbacks = make_callbacks(config.get("callbacks") or {}, built.task)
    accumulations = accumulations_of(request, callbacks)
    attach(built.task, job, control, request, devices, strategy, loaders, accumulations)
    convert(built.task, whole_dtype(trainer.precision))  # what it made only now
    refuse_sparse(built.task, alone=devices.world.world_size == request.strategy.batch_shards(devices.world).total == 1)
    strategy.check(built.task, devices.requested)  # of a module that may have made its layers only now
    if trainer.compile and devices.layout is None:
        extra("trainer.compile")(built.task, trainer, request.strategy)
    if "datamodule" in config["data"]:
        loaders |= loading.loaders(own=built.task.dataloaders(mode))
    leave_to(built.task, loaders, mode)
    loggers = logger_sections(config, check=devices.world.is_main)
    checkpoint = monitored(request, loaders, built.task)
    start = start_of(job, request, built.task, loaders.get("train"), control)
    return Recipe(
        job=job,
        request=request,
        control=control,
        devices=devices,
        trainer=trainer,
        strategy=strategy,
        loaders=loaders,
        built=built,
        weights=start.weights,
        callbacks=callbacks,
        length=Length(len(loaders.get("train", ())), trainer, accumulations),
        loggers=loggers,
        checkpoint=checkpoint,
        checkpoint_path=start.path,
        state=start.state,
        warnings=[*built.warnings, *foreseen(request, built.task, loaders, checkpoint, callbacks), *start.warnings],
    )


@dataclass(frozen=True)
class Start:
    """What a run starts from: a checkpoint, weights alone, or, with neither, what the model was made with."""

    path: Path | None = None
    state: State | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def start_of(job: Job, request: Request, task: Task, train: Loader | None, control: Control) -> Start:
    """Return what the run starts from, where it does not take the place of a lost rank: then the others have the state.

    Args:
        train: the loader that goes on from a state's cursor; ``None`` where nothing is trained.
        control: shares the work of verification among ranks.

    Raises:
        RequestError: there is no such file, it cannot be read, or it is of another model or of other batches.
    """
    if job.regroup is not None:
        return Start()
    directory, mode, weights_from = job.directory, request.run.mode, request.run.weights_from
    if paths := find(request.run.ckpt_path, directory):
        from ddp_recipes.build.resume import resumed

        path, state, found = resumed(paths, request, directory, task, train, control)
        return Start(path, state, warnings=found)
    if weights_from is not None:
        from ddp_recipes.build.resume import takes

        full = {outside(name): name for name in task.state_dict()}
        weights, warnings = extra("weights_from")(
            weights_from, task.weights(), lambda name, value: takes(task, full[name], value)
        )
        return Start(weights=weights, warnings=warnings)
    if mode == "export":
        raise RequestError(f"mode=export: {directory} has no checkpoint. Give a run directory or a file as ckpt_path.")
    if mode == "fit":
        return Start()
    return Start(warnings=[f"mode={mode} without ckpt_path: the weights are the model's initial ones."])


def strategy_of(target: str, request: Request) -> Strategy:
    """Return the strategy that a dotted name names.

    Raises:
        RequestError: it is none of this package's protocol.
    """
    made = locate(target, "strategy")
    if missing := sorted(getattr(made, "__abstractmethods__", ())):
        raise RequestError(
            f"strategy._target_={target} lacks {', '.join(missing)}, which each strategy has. Write them as "
            f"ddp_recipes.strategies.base.Strategy says, or derive it from one that has them."
        )
    strategy: Strategy = made(request.strategy)
    return strategy


def accumulations_of(request: Request, callbacks: Mapping[str, Callback]) -> list[Mapping[int, int]]:
    """Return how many batches make a step by epoch, as callbacks say.

    Raises:
        RequestError: what is asked for takes one number for all epochs.
    """
    found = [each.accumulation for each in callbacks.values()]
    if request.run.work != request.run.mode and any(found):
        raise RequestError(
            "plan=true, check and tune take trainer.accumulate_grad_batches for all epochs, and a callback changes it "
            "from epoch to epoch. Leave that callback out."
        )
    return found


def attach(
    task: Task,
    job: Job,
    control: Control,
    request: Request,
    devices: Devices,
    strategy: Strategy,
    loaders: Mapping[str, Loader],
    accumulations: Sequence[Mapping[int, int]],
) -> None:
    """Give the task what it may ask of the run around it.

    Raises:
        RequestError: it has modules without shapes, which a strategy that exchanges gradients has to know.
    """
    trainer = request.trainer.effective()
    node = job.config["data"].get("datamodule") or {}
    loggers = logger_sections(job.config, check=False)
    checkpoints: Sequence[Path] = ()
    with suppress(RequestError):  # it is refused later, unless this rank takes the place of a lost one
        checkpoints = find(request.run.ckpt_path, job.directory)
    task.attach(
        RunContext(
            mode=request.run.mode,
            world=devices.world,
            trainer=trainer,
            parallelism=request.strategy,
            devices=devices.own,
            loaders=loaders,
            total_steps_of=lambda batches: Length(batches, trainer, accumulations).total_steps,
            directory=job.directory,
            sum=strategy.sum,
            first_on_node=partial(control.first_on_node, what="prepare_data"),
            datamodule=make(node, "data.datamodule") if node.get("_target_") else None,
            brings_data="datamodule" in job.config["data"],
            loggers=[str(each["_target_"]).rpartition(".")[2] for each in loggers.values()],
            ckpt_path=next(map(str, checkpoints), None),
        )
    )
    if request.strategy.exchanges(devices.world):
        without = ", which strategy=single does without" if request.run.mode == "export" else ""
        refuse_lazy(task, f"There is no batch to try out at this point{without}")


def leave_to(task: Task, loaders: dict[str, Loader], mode: str) -> None:
    """Leave of the loaders, which the task has as well, those that it asks for, and batches to it that it moves."""
    if mode == "fit" and not task.validates:
        for name in [name for name in loaders if name != "train"]:
            del loaders[name]
    for loader in loaders.values():
        loader.moves = not task.moves_batches


def foreseen(
    request: Request,
    task: Task,
    loaders: Mapping[str, Loader],
    checkpoint: CheckpointSettings,
    callbacks: Mapping[str, Callback],
) -> Iterator[str]:
    """Yield what the objects of a run give reason to warn of."""
    yield from uncalled(callbacks)
    if getattr(task.loss, "reduction", None) == "sum":
        yield (
            "task.loss has reduction=sum. A step takes the mean over the samples of all ranks and accumulated batches "
            "of what their losses are, so this one is smaller the more of them there are. Use reduction=mean."
        )
    trainer, batches = request.trainer.effective(), len(loaders.get("train", ()))
    interval = trainer.val_check_interval
    if task.undecided and batches and (trainer.accumulate_grad_batches > 1 or loaders["train"].plan.num_shards > 1):
        yield (
            f"task.loss has weights of classes, and with a training_step of its own {type(task).__name__} trains on "
            f"batches that weigh as much as their samples: with other ranks, or accumulated ones, the numbers are "
            f"others. Set task.mean_over=targets if it returns this loss, or task.mean_over=samples to keep it so."
        )
    validates, every = "train" in loaders and len(loaders) > 1, trainer.check_val_every_n_epoch
    if validates and trainer.max_epochs is not None and every > trainer.max_epochs > 0:
        yield (
            f"trainer.check_val_every_n_epoch={every} is more than trainer.max_epochs={trainer.max_epochs}, so nothing "
            f"is ever validated."
        )
    if validates and isinstance(interval, int) and interval > batches:
        yield (
            f"trainer.val_check_interval={interval} is more than the {batches} batches of an epoch, so nothing is ever "
            f"validated. Give at most {batches}, or a fraction of an epoch such as 1.0."
        )
    promises: dict[str, list[str]] = {}
    for loader in loaders.values():
        promises.setdefault(loader.promises, []).append(loader.name)
    yield from (f"{', '.join(names)}: {promise}" for promise, names in promises.items() if promise)
    if len(loaders) > 2 and request.checkpoint.enabled and request.checkpoint.auto_monitor:
        yield f"checkpoint.monitor=auto is {checkpoint.monitor}, of the first of {', '.join(list(loaders)[1:])}."


def monitored(request: Request, loaders: Mapping[str, Loader], task: Task) -> CheckpointSettings:
    """Return the settings of checkpoints with the metric to monitor and its mode resolved.

    Raises:
        RequestError: the metric cannot come up, as far as that is known before running, or its mode is not known.
    """
    settings, fits = request.checkpoint, request.run.mode == "fit"
    monitor = settings.monitor
    if monitor is None or settings.auto_monitor:
        evaluated = [name for name in loaders if split_of(name) == "val"]
        monitor = f"{evaluated[0]}/loss" if evaluated else "train/loss" if fits else "val/loss"
        return replace(settings, monitor=monitor, mode="min" if settings.mode == "auto" else settings.mode)
    known = {f"train/{name}" for name in ("loss", "lr", "grad_norm", "samples_per_second", "epoch")}
    measured = [split for split in loaders if split != "train" or task.train_metrics]
    known |= {f"{split}/{name}" for split in measured for name in ("loss", *task.metric_names)}
    own_steps = type(task).validation_step is not Task.validation_step
    if fits and not task.names_metrics and not (own_steps and monitor.startswith("val/")):
        check_measured(monitor, known)
    mode = resolved(settings.mode, monitor, "checkpoint.mode") if fits and settings.enabled else settings.mode
    return replace(settings, monitor=monitor, mode=mode)
