"""The objects of one run on one rank; the other modules of this folder make them, with plain arguments."""

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
from omegaconf import OmegaConf
from torch import Tensor

from ddp_recipes.build.data import make_loaders
from ddp_recipes.build.instantiate import locate, make
from ddp_recipes.build.loggers import logger_sections, make_logger
from ddp_recipes.build.model import make_task
from ddp_recipes.build.optimizer import make_optimizer, make_optimizer_and_schedule
from ddp_recipes.build.resume import load_state
from ddp_recipes.callbacks import Callback
from ddp_recipes.checkpointing.files import State
from ddp_recipes.config.request import Request, visible_gpus
from ddp_recipes.config.settings import seconds
from ddp_recipes.data.loader import Loader
from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.loggers import Logger
from ddp_recipes.model_parallel import Stage
from ddp_recipes.runtime import fast_paths
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.process import loading
from ddp_recipes.runtime.seeding import seed_everything
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import Strategy
from ddp_recipes.strategies.base import Wrapped
from ddp_recipes.tasks import Task
from ddp_recipes.training.non_finite import Watch
from ddp_recipes.training.precision import make_precision
from ddp_recipes.training.state import Run, restore
from ddp_recipes.training.stopping import Stopper


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
        request.strategy.check_world_size(world.world_size)
        self.strategy: Strategy = locate(self.config.strategy._target_, "strategy")(request.strategy)
        self.loaders = control.first_on_node(self._make_loaders) if self._downloads else self._make_loaders()
        self.warnings: list[str] = []  # told once there is a log
        self.stages: list[Stage] = []  # of a model that is split
        self.sharded = False  # the strategy has decided what this rank holds
        seed_everything(request.run.seed)
        self.task = self._make_task()
        self._check_strategy()
        self.callbacks: list[Callback] = [
            make(node, f"callbacks.{name}") for name, node in (self.config.get("callbacks") or {}).items()
        ]
        self.loggers = logger_sections(self.config, check=self.world.is_main)
        self.monitor = self._monitor()
        self.checkpoint_path: Path | None = None
        self.state = self._load()
        if self.mode == "fit":
            with loading():  # an optimizer that is not torch's own may bring its compiler
                self.optimizer, self.schedule = make_optimizer_and_schedule(
                    self.config, self.task, self.trainer.precision, self.total_steps, self.steps_per_epoch
                )

    # What the config says

    def _devices(self) -> list[torch.device]:
        if self.layout is not None:
            return [torch.device("cpu")] * self.request.num_devices  # in a dry run nothing runs
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
        fast_paths.enable(self.trainer.fast_paths)
        if self.trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        if self.trainer.deterministic != torch.are_deterministic_algorithms_enabled():  # the call loads the compiler
            torch.use_deterministic_algorithms(self.trainer.deterministic)
        torch.autograd.set_detect_anomaly(self.trainer.detect_anomaly)
        if self.device.type == "cpu":
            fast_paths.keep_freed_memory()

    def _check_strategy(self) -> None:
        devices, backend = self.devices, self.backend
        if self.layout is not None:
            devices = [torch.device(self.layout.device_type, number) for number in range(len(devices))]
            backend = "gloo"  # what this torch was built without, the one on the cluster may have
        self.strategy.check(self.task, devices, backend)

    @property
    def device_name(self) -> str:
        """What the devices are called; in a dry run a GPU has no name."""
        if self.layout is not None:
            return {"cuda": "GPU", "cpu": "CPU"}[self.layout.device_type]
        return "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    @property
    def _downloads(self) -> bool:
        return bool(self.config.data.get("download", False))

    def _make_loaders(self) -> dict[str, Loader]:
        request = self.request
        return make_loaders(
            self.config.data,
            request.data,
            self.trainer,
            self.mode,
            request.run.seed,
            request.strategy.batch_shards(self.world),
            self.strategy.replicas(self.device.type),
            self.device,
        )

    def _make_task(self) -> Task:
        built = make_task(
            self.config,
            self.request.model,
            self.request.strategy,
            self.devices,
            next(iter(self.loaders.values()), None),
            "training_step" if self.mode == "fit" else "predict_step",
            make_precision(self.trainer.precision, self.device.type),
            partial(self.control.of_main, "times of the model's modules") if self.layout is None else None,
            compiled=self.trainer.compile and self.layout is None,
        )
        self.warnings += built.warnings
        self.stages = built.stages
        self.strategy.starts = built.starts
        return built.task

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
        train = self.loaders["train"] if self.mode == "fit" else None
        found = load_state(self.request, self.job.directory, self.task.weights(), train)
        if found is None:
            return None
        self.checkpoint_path, state, warnings = found
        self.warnings += warnings
        return state

    def optimizer_of(self, task: Task) -> torch.optim.Optimizer:
        """Return a new optimizer for a task of this recipe's kind."""
        return make_optimizer(self.config, task, self.trainer.precision)

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
        if self.layout is None:  # in a dry run there are no other ranks
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
            shards=self.request.strategy.fixed_shards,
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
        self.sharded = True

    @property
    def whole(self) -> bool:
        """Whether this rank has all of the model."""
        return not self.sharded or self.request.strategy.pipeline is None

    def final_weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the whole model on rank 0. A collective."""
        return self.strategy.weights(self.task) if self.sharded else self.task.weights()

    def make_stopper(self) -> Stopper:
        """Return what decides on stopping before the end."""
        return Stopper(self.world, self.strategy.sum, self.device, seconds(self.trainer.max_time))

    @property
    def logs_graph(self) -> bool:
        """Whether a logger is to write the model's graph."""
        return any(node.get("graph", False) for node in self.loggers.values())

    def make_logger(self, purge_step: int | None) -> Logger:
        """Return the logger, which may be several; rank 0 only."""
        return make_logger(self.loggers, self.job.directory, purge_step)
