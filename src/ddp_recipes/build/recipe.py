"""From config to objects to a finished run, on one rank. The only place that makes objects of the config."""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from hydra._internal.utils import _locate  # hydra.utils.get_object is this, and also prints the error
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ddp_recipes.callbacks import Callback
from ddp_recipes.checkpointing.files import State, check_weights, find, load_first
from ddp_recipes.config.request import Request, visible_gpus
from ddp_recipes.config.settings import ModelSettings, batches, seconds
from ddp_recipes.data.batch_plan import BatchPlan
from ddp_recipes.data.loader import Loader, size_of
from ddp_recipes.errors import RequestError, nearest, not_one_of
from ddp_recipes.loggers import Logger
from ddp_recipes.model_parallel import Rehearsal, Stage, apart, in_micro_batches, split_model, timed
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.process import keep_freed_memory, loading
from ddp_recipes.runtime.seeding import seed_everything
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Strategy
from ddp_recipes.strategies.base import Wrapped
from ddp_recipes.tasks import Task
from ddp_recipes.training.loop import Run, Schedule, restore
from ddp_recipes.training.non_finite import Watch
from ddp_recipes.training.optimizers import uncompiled
from ddp_recipes.training.precision import make_precision
from ddp_recipes.training.stopping import Stopper

SPLITS = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict", "test", "val"),
    "export": (),
}


class Recipe:
    """The objects of one run on this rank, in the order in which they need each other.

    Making one reads data and builds the model, but starts nothing and writes nothing: what is wrong is found here.

    Raises:
        RequestError: something in the config cannot be made.
    """

    def __init__(self, job: Job, world: World, control: Control) -> None:
        self.job, self.world, self.control = job, world, control
        self.config = OmegaConf.create(dict(job.config))
        self.request = request = Request.of(job.config)
        self.mode = request.run.mode
        self.trainer = request.trainer.effective()
        self.layout = request.layout(visible_gpus()) if request.run.plan else None
        if self.layout is not None:
            self.world = world = self.layout.world
        self.devices = self._devices()
        self.device = self.devices[0]
        self.backend = request.launcher.backend
        if self.backend == "auto":
            device_type = self.device.type if self.layout is None else self.layout.device_type
            self.backend = "nccl" if device_type == "cuda" else "gloo"
        self._set_torch_up()
        self.strategy: Strategy = self._make("strategy", without=["processes"])
        if request.single_process and world.world_size > 1:
            raise RequestError(
                f"strategy={self.strategy.name} runs in one process, but {world.world_size} were started. "
                f"Use strategy=ddp, or start one process."
            )
        self.loaders = control.first_on_node(self._make_loaders) if self._downloads else self._make_loaders()
        self.warnings: list[str] = []  # told once there is a log
        self.stages: list[Stage] = []  # of a model that is split
        self.whole = True  # this rank has all of the model
        seed_everything(request.run.seed)
        self.task = self._make_task()
        self._check_strategy()
        self.callbacks: list[Callback] = [
            _instantiate(node, f"callbacks.{name}") for name, node in (self.config.get("callbacks") or {}).items()
        ]
        self.monitor = self._monitor()
        self.checkpoint_path: Path | None = None
        self.state = self._load()
        if self.mode == "fit":
            with loading():  # an optimizer that is not torch's own may bring its compiler
                self.optimizer, self.schedule = self._make_optimizer()

    # What the config says

    def _devices(self) -> list[torch.device]:
        if self.layout is not None:
            return [torch.device("cpu")] * self.request.num_devices  # on paper nothing runs
        device_type = self.request.device_type(torch.cuda.device_count())
        k = self.request.num_devices
        if device_type == "cpu":
            return [torch.device("cpu")] * k
        first, there = self.world.local_rank * k, torch.cuda.device_count()
        if first + k > there:
            raise RequestError(
                f"Local rank {self.world.local_rank} needs {k} GPU(s) from number {first} on "
                f"(model.num_devices={k}), but {there} are visible: {there // k} replica(s) fit on a node. Start that "
                f"many processes on each."
            )
        torch.cuda.set_device(first)
        return [torch.device("cuda", number) for number in range(first, first + k)]

    def _set_torch_up(self) -> None:
        if self.trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        if self.trainer.deterministic != torch.are_deterministic_algorithms_enabled():  # the call loads the compiler
            torch.use_deterministic_algorithms(self.trainer.deterministic)
        torch.autograd.set_detect_anomaly(self.trainer.detect_anomaly)
        if self.device.type == "cpu":
            keep_freed_memory()

    def _make(self, section: str, *arguments: Any, without: Sequence[str] = (), **runtime: Any) -> Any:
        node = self.config[section]
        return _instantiate(
            OmegaConf.masked_copy(node, [name for name in node if name not in without]), section, *arguments, **runtime
        )

    def _check_strategy(self) -> None:
        devices, backend = self.devices, self.backend
        if self.layout is not None:
            devices = [torch.device(self.layout.device_type, number) for number in range(len(devices))]
            backend = "gloo"  # what this torch was built without, the one on the cluster may have
        self.strategy.check(self.task, devices, backend)

    @property
    def device_name(self) -> str:
        """What the devices are called; on paper a GPU has no name."""
        if self.layout is not None:
            return {"cuda": "GPU", "cpu": "CPU"}[self.layout.device_type]
        return "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    @property
    def _downloads(self) -> bool:
        return bool(self.config.data.get("download", False))

    def _make_loaders(self) -> dict[str, Loader]:
        """Return the loaders that this mode needs, by split; validation may be missing in ``fit``."""
        names = SPLITS[self.mode]
        if not names:
            return {}
        found = [name for name in names if self.config.data.get(name) is not None]
        if not found or (self.mode == "fit" and "train" not in found):
            needed = " or ".join(f"data.{name}" for name in (names[:1] if self.mode == "fit" else names))
            raise RequestError(
                f"mode={self.mode} needs {needed}, which this data choice does not have. Give it in the data "
                "yaml, or choose another data or mode."
            )
        chosen = found if self.mode == "fit" else found[:1]
        loaders = {name: self._make_loader(name) for name in chosen}
        if self.trainer.overfit_batches and "val" in loaders:
            loaders["val"] = loaders["train"]
        return loaders

    def _make_loader(self, split: str) -> Loader:
        data, world = self.request.data, self.world
        dataset = _instantiate(self.config.data[split], f"data.{split}")
        parts = self.strategy.parts(world)
        reader, readers = self.strategy.reader(world)
        replicas = readers * parts * self.strategy.replicas(self.device.type)
        training = split == "train"
        if not training:
            global_batch = data.val_batch_size * replicas
        else:
            global_batch = data.global_batch_size or data.batch_size * replicas
            if global_batch < replicas:
                raise RequestError(
                    f"data.global_batch_size={global_batch} is less than one sample for each of {replicas} replicas. "
                    f"Use at least {replicas}, or fewer {'processes' if parts == 1 else 'shards'}."
                )
        plan = BatchPlan(
            num_samples=size_of(dataset),
            global_batch_size=global_batch,
            parts=readers * parts,
            seed=self.request.run.seed,
            shuffle=training and data.shuffle and not self.trainer.overfit_batches,
            drop_last=training and data.drop_last,
            shard=data.shard,
        )
        limit = getattr(self.trainer, f"limit_{split}_batches")
        return Loader(
            dataset,
            plan.limited(batches(limit, plan.num_batches)),
            self.device,
            parts=range(reader * parts, (reader + 1) * parts),
            num_workers=data.num_workers,
            pin_memory=data.pin_memory,
        )

    def _make_task(self) -> Task:
        """Return the task with its model on the replica's devices, weights drawn from the seed on the CPU."""
        node, settings = self.config.model, self.request.model
        places_itself = "devices" in _parameters(node._target_, "model")
        cut = "strategy=ddp_pipeline cuts the model" if self.strategy.stages > 1 else f"model.split={settings.split}"
        if places_itself and (settings.split is not None or self.strategy.stages > 1):
            raise RequestError(
                f"{cut}, but {node._target_} takes `devices` and places itself. Leave out "
                f"{cut.split('=')[0]}, or choose the model without '_mp'."
            )
        runtime = {"devices": self.devices} if places_itself else {}
        model = self._make("model", without=[key.name for key in fields(ModelSettings)], **runtime)
        if not isinstance(model, torch.nn.Module):
            raise RequestError(f"model._target_={node._target_} made a {type(model).__name__}, which is no nn.Module.")
        task: Task = self._make("task", model=model)
        if settings.micro_batches > 1:
            in_micro_batches(model, settings.micro_batches)
        if places_itself:
            task.loss.to(self.devices[-1])
        elif (settings.num_devices > 1 or self.strategy.stages > 1) and self.loaders:
            names = [str(name) for name in settings.split] if isinstance(settings.split, list) else None
            rehearsal = self._rehearsal(task)
            if settings.split == "timed" and self.layout is None:
                precision = make_precision(self.trainer.precision, self.device.type)
                time_it = partial(timed, rehearsal, self.device, precision.forward)
                rehearsal.times = partial(self.control.of_main, "times of the model's modules", time_it)
            elif settings.split == "timed":
                self.warnings.append(
                    "model.split=timed: on paper there is no device to time on, so stages are even as with auto."
                )
            if self.strategy.stages > 1:  # the task stays on the CPU: no device may have room for all of it
                self.strategy.starts, self.stages = apart(task.model, self.strategy.stages, names, rehearsal)
            else:
                self.stages = split_model(task, self.devices, names, rehearsal)
            if rehearsal.failure is not None:
                self.warnings.append(f"The split could not be tried out before training: {rehearsal.failure}")
        else:
            task.to(self.device)
        if self.trainer.compile and self.layout is None:
            model.compile()
        return task

    def _rehearsal(self, task: Task) -> Rehearsal:
        """Return a step of the task to be tried out on a batch of this run's size, the same on every rank."""
        loader = next(iter(self.loaders.values()))
        step = "training_step" if self.mode == "fit" else "predict_step"
        return Rehearsal(task, step, loader.sample(), loader.plan.share(0, 0))

    def _monitor(self) -> str:
        """Return the metric to monitor; refuse one that cannot come up, as far as that is known before running."""
        monitor = self.request.checkpoint.monitor
        if monitor in (None, "auto"):
            return "val/loss" if "val" in self.loaders or self.mode != "fit" else "train/loss"
        known = {f"train/{name}" for name in ("loss", "lr", "grad_norm", "samples_per_second", "epoch")}
        if "val" in self.loaders:
            known |= {f"val/{name}" for name in ("loss", *self.task.metrics)}
        own_steps = type(self.task).validation_step is not Task.validation_step
        if monitor not in known and not (own_steps and monitor.startswith("val/")) and self.mode == "fit":
            raise RequestError(
                f"checkpoint.monitor={monitor} is not measured. Measured are: {', '.join(sorted(known))}."
                f"{nearest(monitor, known)}"
            )
        return monitor

    def _load(self) -> State | None:
        """Return the state to start from, checked against this run's model and batches, or ``None``."""
        paths = find(self.request.run.ckpt_path, self.job.directory)
        if not paths:
            if self.mode == "export":
                raise RequestError(
                    f"mode=export: {self.job.directory} has no checkpoint. Give a run directory or a file as ckpt_path."
                )
            return None
        path, state, warnings = load_first(paths)
        self.warnings += warnings
        self.checkpoint_path = path
        check_weights(path, state["model"], self.task.weights())
        if self.mode == "fit":
            self._fit_cursor(path, state)
        return state

    def _fit_cursor(self, path: Path, state: State) -> None:
        """See that this run's batches go on where those of the checkpoint ended; refuse, or begin a little earlier."""
        train, cursor, was = self.loaders["train"], state["cursor"], state["global_batch_size"]
        now, done = train.plan.global_batch_size, cursor["batch"]
        shards = state.get("shards")
        if None not in (shards, self.request.shards) and shards != self.request.shards and self.request.resume.strict:
            raise RequestError(
                f"{path} was trained in {shards} shards, this run has {self.request.shards}: it would not end with the "
                f"same weights. Set strategy.shards={shards}, or resume.strict=false to go on all the same."
            )
        if was == now and done < len(train):
            return
        if self.request.resume.strict:
            differs, remedy = (
                f"was trained with a global batch of {was} samples, this run has {now}",
                f"data.global_batch_size={was}",
            )
            if was == now:
                differs = f"is from after batch {done} of an epoch, this run has {len(train)} batches an epoch"
                remedy = "the limits of trainer.* and the data as they were"
            raise RequestError(
                f"{path} {differs}: it would not go on where that one stopped. Set {remedy}, or resume.strict=false to "
                f"go on as nearly as can be, or start afresh without ckpt_path."
            )
        cursor["batch"] = at = min(done * was // now, len(train) - 1)
        again = min(done * was, len(train) * now) - at * now
        self.warnings.append(
            f"{path} is from after {done} batches of {was} samples. Epoch {cursor['epoch']} goes on at batch {at} of "
            f"{now} samples: {again} are seen twice, none is left out. The schedule is the checkpoint's."
        )

    def optimizer_of(self, task: Task) -> torch.optim.Optimizer:
        """Return a new optimizer for a task of this recipe's kind."""
        own = task.configure_optimizers()
        return self._configured_optimizer(task) if own is None else own[0]

    def _configured_optimizer(self, task: Task) -> torch.optim.Optimizer:
        """Return the config's optimizer, of one kernel for all parameters where it may be."""
        fused: dict[str, Any] = {"fused": True} if self._may_fuse else {}
        optimizer: torch.optim.Optimizer = self._make("optimizer", task.parameters(), **fused)
        return optimizer

    def _make_optimizer(self) -> tuple[torch.optim.Optimizer, Schedule]:
        """Return optimizer and scheduler: the module's own, where it is one of Lightning's, else the config's."""
        own = self.task.configure_optimizers()
        optimizer = self._configured_optimizer(self.task) if own is None else own[0]
        if own is None or own[1] is None:
            return optimizer, self._make_schedule(optimizer)
        return optimizer, Schedule(own[1], own[2])

    @property
    def _may_fuse(self) -> bool:
        """Whether the optimizer is one of torch's that may update all parameters in one kernel, unless told otherwise.

        Not with 16-mixed: where the very first step is skipped, torch's fused SGD goes on from uninitialised momentum.
        Nor Adagrad on a GPU: in torch 2.10 its fused step is for the CPU alone.
        """
        node = self.config.optimizer
        return (
            node.get("fused") is None
            and not node.get("foreach")
            and node._target_.startswith("torch.optim.")
            and "fused" in _parameters(node._target_, "optimizer")
            and self.trainer.precision != "16-mixed"
            and (self.device.type == "cpu" or node._target_.rpartition(".")[2] != "Adagrad")
            and all(parameter.is_floating_point() for parameter in self.task.parameters())
        )

    def _make_schedule(self, optimizer: torch.optim.Optimizer) -> Schedule:
        """Return the scheduler; a length that its yaml leaves null is that of the run, in ticks."""
        node = self.config.scheduler
        interval = node.get("interval", "epoch")
        if interval not in ("step", "epoch"):
            raise not_one_of("scheduler.interval", interval, ("step", "epoch"))
        lengths = [name for name in ("T_max", "total_steps") if name in node and node[name] is None]
        steps = self.total_steps
        if lengths and not steps:
            raise RequestError(
                f"scheduler.{lengths[0]} follows the length of the run, which is not known: set it, or set "
                f"trainer.max_epochs or trainer.max_steps to at least 1."
            )
        ticks = steps if steps is None or interval == "step" else -(-steps // self.steps_per_epoch)
        scheduler = self._make("scheduler", optimizer, without=["interval", *lengths], **dict.fromkeys(lengths, ticks))
        return Schedule(scheduler, interval)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; the last one may accumulate fewer batches."""
        return -(-len(self.loaders["train"]) // self.trainer.accumulate_grad_batches)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps to the end of the run, or ``None`` if only time limits it."""
        epochs, steps = self.trainer.max_epochs, self.trainer.max_steps
        limits = [epochs * self.steps_per_epoch if epochs is not None else None, steps]
        return min((limit for limit in limits if limit is not None), default=None)

    # What the run needs once all ranks are ready

    def join(self) -> None:
        """Join the other ranks. A collective."""
        launcher = self.request.launcher
        timeout = timedelta(seconds=launcher.timeout_s)
        self.strategy.setup(self.world, self.control.store, self.backend, timeout, launcher.init_method)

    def make_run(self, stopper: Stopper) -> Run:
        """Return what the loop works with, restored from the checkpoint if there is one. A collective."""
        self.load_weights()
        module = cast(Wrapped, self.task)
        if self.layout is None:  # on paper there are no other ranks
            self.shard()
            module = self.strategy.wrap(self.task, self.devices)
        run = Run(
            world=self.world,
            task=self.task,
            module=module,
            strategy=self.strategy,
            devices=self.devices,
            optimizer=self.optimizer,
            schedule=self.schedule,
            precision=make_precision(self.trainer.precision, self.device.type),
            train=self.loaders["train"],
            val=self.loaders.get("val"),
            trainer=self.trainer,
            checkpoint=self.request.checkpoint,
            monitor=self.monitor,
            seed=self.request.run.seed,
            shards=self.request.shards,
            stopper=stopper,
            watch=Watch(self.world, self.strategy.sum, self.device),
            callbacks=self.callbacks,
        )
        if self.state is not None:
            restore(run, self.state)
        self.task.train()
        return run

    @property
    def resumes_in_place(self) -> bool:
        """Whether the run goes on with what is in its own run directory."""
        path = self.request.run.ckpt_path
        return self.mode == "fit" and (
            path == "auto"
            or (self.checkpoint_path is not None and self.checkpoint_path.is_relative_to(self.job.directory))
        )

    def load_weights(self) -> int:
        """Take the weights of the checkpoint, if there is one; return the step they are from."""
        if self.state is None:
            return 0
        self.task.load_weights(self.state["model"])
        step: int = self.state["cursor"]["step"]
        return step

    def shard(self) -> None:
        """Leave this rank what it holds of the model. A collective."""
        self.strategy.shard(self.task, self.devices)
        self.whole = self.strategy.stages == 1

    def final_weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the whole model on rank 0. A collective where ranks hold parts."""
        return self.task.weights() if self.whole else self.strategy.weights(self.task)

    def make_stopper(self) -> Stopper:
        """Return what decides on stopping before the end."""
        return Stopper(self.world, self.strategy.sum, self.device, seconds(self.trainer.max_time))

    def make_logger(self, purge_step: int | None) -> Logger:
        """Return the logger; rank 0 only."""
        logger: Logger = self._make("logger", directory=str(self.job.directory / "tensorboard"), purge_step=purge_step)
        return logger


def _parameters(target: str, section: str) -> Mapping[str, inspect.Parameter]:
    try:
        found = _locate(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise RequestError(f"{section}._target_={target} cannot be found: {_last_line(error)}") from None
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):  # it has none, or cannot be called, which comes out when it is
        return {}


def _instantiate(node: DictConfig, section: str, *arguments: Any, **runtime: Any) -> Any:
    """Make an object of a config node; lists arrive as lists, and runtime objects untouched.

    Raises:
        RequestError: the target is not there or does not take these arguments, or it refused them itself.
    """
    if "_target_" not in node:
        raise RequestError(f"{section} has no _target_, the dotted name of a class or function to call.")
    try:
        made = instantiate(node, _convert_="all", _partial_=True)
        return partial(uncompiled(made.func), *made.args, **made.keywords)(*arguments, **runtime)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, RequestError) or not isinstance(cause, (ImportError, InstantiationException)):
            raise cause from None  # the target's own words, of an object nested in this one
        raise RequestError(f"{section}._target_={node._target_} cannot be made: {_last_line(cause)}") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError) and "argument" in str(error):
            raise RequestError(
                f"{section} does not fit {node._target_}: {error}. Check the keys of {section}."
            ) from error
        if not str(node._target_).startswith(("ddp_recipes.", "torch.", "torchvision.")):
            raise  # a user's own code: the traceback is what helps
        given = ", ".join(f"{name!s}={value}" for name, value in node.items() if str(name)[0] != "_")
        raise RequestError(f"{section} does not fit {node._target_}: {error}. Check the values of {given}.") from error


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("full_key")]
    return lines[-1] if lines else type(error).__name__
