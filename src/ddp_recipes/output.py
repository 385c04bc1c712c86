"""All that a run shows and leaves behind. Rank 0 writes it; other ranks hand their warnings over."""

import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from torch import Tensor

from ddp_recipes._version import __version__
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.checkpointing.manager import FileCheckpointer
from ddp_recipes.checkpointing.writing import write_aside
from ddp_recipes.config.parallelism import PipelineShape
from ddp_recipes.loggers import Logger
from ddp_recipes.model_parallel.timeline import Cell, bubble, order, timeline
from ddp_recipes.reporting.figures.schedule import draw_schedule
from ddp_recipes.reporting.figures.split import draw_split
from ddp_recipes.reporting.progress import Progress, make_progress, number, table
from ddp_recipes.reporting.run_directory import RunDirectory, Summary, write_summary
from ddp_recipes.runtime.control import Control, ForwardHandler
from ddp_recipes.runtime.digest import digest
from ddp_recipes.strategies.base import batch_norms
from ddp_recipes.training.state import Cursor, Metrics, Run

log = logging.getLogger(__name__)

T = TypeVar("T")


class Output:
    """Opened once all ranks are ready, closed however the run ends.

    Args:
        directory: the claimed run directory on rank 0, ``None`` elsewhere.
    """

    def __init__(self, recipe: Recipe, control: Control, directory: RunDirectory | None) -> None:
        self.recipe = recipe
        self.control = control
        self.directory = directory
        self.opened = False
        self.run: Run | None = None
        self.metrics: Metrics = {}
        self.logger = Logger()
        self.progress = Progress()
        self._started = time.time()
        self._stack = ExitStack()

    def open(self, run: Run | None) -> None:
        """Begin to write; a training ``run`` gets its logger, progress and checkpointer."""
        self.opened = True
        self.run = run
        if self.directory is None:
            self._attach(ForwardHandler(self.control), "%(message)s")
            return
        recipe, job = self.recipe, self.recipe.job
        quick = bool(recipe.trainer.fast_dev_run)
        self.directory.record(job.config, job.hydra)
        self.progress = make_progress(recipe.trainer.progress, sys.stdout)
        self._stack.callback(self.progress.stop)
        self._attach(_LogFile(self.directory, self.control), "%(asctime)s %(levelname)s %(message)s")
        self._attach(_Console(self.progress), "%(message)s")
        table("ddp_recipes " + __version__, self._start_rows(), sys.stdout)
        for warning in recipe.warnings:
            log.warning("%s", warning)
        if not quick:
            # What an earlier start logged after its checkpoint comes again.
            purge_step = run.cursor.step + 1 if run is not None and recipe.resumes_in_place else None
            self.logger = recipe.make_logger(purge_step)
            self._stack.callback(self.logger.close)
            self.logger.text("config", f"```yaml\n{OmegaConf.to_yaml(recipe.config)}\n```")
            self._draw_split()
            self._draw_schedule()
        if run is None:
            return
        run.logger, run.progress = self.logger, self.progress
        if recipe.request.checkpoint.enabled and not quick:
            folder, alone = job.directory / "checkpoints", recipe.world.world_size == 1
            run.checkpointer = FileCheckpointer(folder, recipe.request.checkpoint, background=not alone)
            if recipe.state is not None:
                run.checkpointer.load_state(recipe.state["checkpointer"], run.cursor.step)
        if recipe.logs_graph and not quick:
            self.logger.graph(recipe.task.model, run.train.sample()[0])
            recipe.task.train()
        self.progress.start(recipe.total_steps, run.cursor.step, run.train.plan.global_batch_size)

    def finish(self, summary: Summary, cause: str | None = None) -> None:
        """Write the summary; show where things are and what came out, or why it failed."""
        self.progress.stop()
        if not self.opened or self.directory is None:
            return
        if cause is not None:
            logging.getLogger("ddp_recipes.failure").error("%s", cause.rstrip())
        write_summary(self.directory.path, summary)
        if cause is None:
            numbers = {name: value for name, value in summary["metrics"].items() if not name.startswith("train/")}
            params = hyper_parameters(self.recipe.job.config) | {"world_size": summary["world_size"]}
            self.logger.hparams(params, numbers or summary["metrics"], chosen=overridden(self.recipe.job.overrides))
            table(f"{summary['status']} in {summary['wall_time_s']:.1f} s", self._end_rows(summary), sys.stdout)

    def wait_for_save(self) -> None:
        """Wait for a checkpoint that is still being written."""
        if self.run is not None:
            self.run.checkpointer.busy(None)

    def hold(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that lasts until :meth:`close`."""
        return self._stack.enter_context(context)

    def close(self) -> None:
        """Close files and give the log handlers back."""
        self._stack.close()
        if self.directory is not None:
            self.directory.close()

    def facts(self, weights: Mapping[str, Tensor] | None) -> Summary:
        """Return what ``summary.json`` says of any run, however it ended.

        Args:
            weights: the model's; ``None`` where this rank does not have them all.
        """
        recipe, run, world = self.recipe, self.run, self.recipe.world
        cursor = run.cursor if run is not None else Cursor(**(recipe.state or {}).get("cursor", {}))
        steps = list(run.step_seconds) if run is not None else []
        best, last = (None, None) if run is None else (run.checkpointer.best, run.checkpointer.last)
        rate = None
        if run is not None and run.train_seconds:
            rate = (cursor.samples_seen - run.samples_before) / run.train_seconds
        metrics = {**(run.metrics if run is not None else {}), **self.metrics}
        return {
            "status": "running",
            "error": None,
            "mode": recipe.mode,
            "world_size": world.world_size,
            "nnodes": world.nnodes,
            "devices_per_replica": self._devices,
            "split": [stage.first for stage in recipe.stages[1:]],
            "strategy": recipe.request.strategy.name,
            "device": "cpu" if recipe.device_name == "CPU" else recipe.device_name,
            "global_step": cursor.step,
            "epoch": cursor.epoch,
            "metrics": metrics,
            "monitor": recipe.monitor,
            "objective": metrics.get(recipe.monitor),
            "overrides": list(recipe.job.overrides),
            "best_checkpoint": None if best is None else str(best),
            "last_checkpoint": None if last is None else str(last),
            "samples_seen": cursor.samples_seen,
            "samples_per_second": rate,
            "step_time_ms": statistics.median(steps) * 1e3 if steps else None,
            "wall_time_s": time.time() - self._started,
            "weights_sha256": digest(weights) if world.is_main and weights is not None else None,
            "run_directory": str(recipe.job.directory),
            "torch": torch.__version__,
            "ddp_recipes": __version__,
            "python": platform.python_version(),
        }

    @property
    def _devices(self) -> int:
        """Devices of a replica, in all of its processes."""
        world = self.recipe.world
        return len(self.recipe.devices) * (world.world_size // self.recipe.request.strategy.batch_shards(world).readers)

    def _draw_split(self) -> None:
        stages = self.recipe.stages
        if not stages:
            return
        if stages[0].time is None:
            log.info("There is no split.png: what blocks cost is known from trying the split out, which failed.")
            return
        name = type(self.recipe.task.model).__name__
        caption = f"{name} over {len(stages)} devices: each replica's blocks and what they take"
        self.leave_picture("split", lambda: draw_split(stages, caption))

    def _draw_schedule(self) -> None:
        pipeline = self.recipe.request.strategy.pipeline
        if self.run is not None and pipeline is not None:
            title = f"{pipeline.schedule}, {pipeline.micro_batches} micro-batches"
            self.leave_picture("schedule", lambda: draw_schedule(cells_of(pipeline), title))

    def leave_picture(self, name: str, draw: Callable[[], bytes]) -> None:
        """Draw a picture into the run directory and the logger, or say why there is none."""
        if find_spec("matplotlib") is None:
            log.info("There is no %s.png: it takes matplotlib. Install ddp-recipes[figures] for it.", name)
            return
        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        png = draw()
        write_aside(self.recipe.job.directory / f"{name}.png", lambda file: file.write(png))
        self.logger.image(name, png)

    def _attach(self, handler: logging.Handler, form: str) -> None:
        """Listen to all loggers and to Python's warnings until :meth:`close`."""
        root = logging.getLogger()
        level = root.level
        handler.setFormatter(logging.Formatter(form))
        root.addHandler(handler)
        root.setLevel(min(level, logging.INFO) or logging.INFO)
        logging.captureWarnings(True)
        self._stack.callback(logging.captureWarnings, False)
        self._stack.callback(root.setLevel, level)
        self._stack.callback(handler.close)
        self._stack.callback(root.removeHandler, handler)

    def _start_rows(self) -> list[tuple[str, str]]:
        recipe, run, world = self.recipe, self.run, self.recipe.world
        count = sum(parameter.numel() for parameter in recipe.task.parameters())
        readers = recipe.request.strategy.batch_shards(world).readers
        replicas = readers * recipe.strategy.replicas(recipe.device.type)
        backend = recipe.backend + (" and shared memory" if recipe.strategy.shares_memory else "")
        rows = [
            ("model", f"{type(recipe.task.model).__name__}, {count:,} parameters"),
            ("strategy", recipe.request.strategy.name + (f" over {backend}" if world.world_size > 1 else "")),
            ("replicas x devices", f"{replicas} x {self._devices} ({recipe.device_name})"),
            *((f"stage {number}", str(stage)) for number, stage in enumerate(recipe.stages)),
        ]
        if (micro_batches := recipe.request.model.micro_batches) > 1:
            note = "; batch norm takes its statistics from each" if batch_norms(recipe.task) else ""
            rows.append(("micro-batches", f"{micro_batches} a batch{note}"))
        if (pipeline := recipe.request.strategy.pipeline) is not None:
            waiting = bubble(cells_of(pipeline))
            note = "; batch norm takes its statistics from each" if batch_norms(recipe.task) else ""
            parts = f"{pipeline.micro_batches} micro-batches{note}"
            rows.append(("schedule", f"{pipeline.schedule}, {parts}; processes wait {waiting:.0%} of the time at best"))
        if run is not None:
            steps = recipe.total_steps
            plan = run.train.plan
            rows += [
                ("data", f"{plan.num_samples:,} samples, {len(run.train):,} batches an epoch"),
                (
                    "global batch",
                    f"{plan.global_batch_size:,} samples"
                    + (f" in {plan.parts} shards" if plan.parts > world.world_size else ""),
                ),
                ("steps", f"{'until max_time' if steps is None else f'{steps:,}'}, from {run.cursor.step:,}"),
            ]
        if recipe.checkpoint_path is not None:
            rows.append(("checkpoint", self._shown(recipe.checkpoint_path)))
        return [*rows, ("run directory", self._shown(recipe.job.directory))]

    def _end_rows(self, summary: Summary) -> list[tuple[str, str]]:
        metrics = sorted(
            summary["metrics"].items(), key=lambda item: item[0].startswith("train/")
        )  # what counts, first
        rows = [(name, number(value)) for name, value in metrics if name != "train/epoch"]
        if summary["step_time_ms"] is not None:
            rows.append(("median step", f"{summary['step_time_ms']:.2f} ms"))
        rows += [
            (name.replace("_", " "), self._shown(summary[name]))
            for name in ("best_checkpoint", "last_checkpoint")
            if summary[name]
        ]
        commands = self.logger.see_with(self._shown(summary["run_directory"])) or ""
        return [*rows, *(("see it with", command) for command in commands.splitlines())]

    def _shown(self, path: str | Path) -> str:
        """Return a path as short as it can be typed here, or in full where here is the run directory itself."""
        here = Path.cwd()
        if Path(path).is_relative_to(here) and not here.is_relative_to(self.recipe.job.directory):
            return str(Path(path).relative_to(here))
        return str(path)


def cells_of(pipeline: PipelineShape) -> list[list[Cell]]:
    """Return when the processes of a pipeline work, if all stages take equally long."""
    works = order(pipeline.schedule, pipeline.stages, pipeline.processes, pipeline.micro_batches)
    return timeline(works, pipeline.stages)


class _LogFile(logging.FileHandler):
    """``train.log``, with the lines that other ranks handed over."""

    def __init__(self, directory: RunDirectory, control: Control) -> None:
        super().__init__(directory.path / "train.log", encoding="utf-8")
        self.control = control

    def emit(self, record: logging.LogRecord) -> None:
        self._take_over()
        super().emit(record)

    def close(self) -> None:
        self._take_over()
        super().close()

    def _take_over(self) -> None:
        for line in self.control.received_logs():
            assert self.stream is not None
            self.stream.write(line + "\n")


class _Console(logging.Handler):
    """The terminal: lines go above the bar. A failure is shown by whoever started the ranks, not here."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "ddp_recipes.failure":
            return
        if type(self.progress) is Progress and record.levelno >= logging.WARNING:  # no progress, but not blind
            print(self.format(record), file=sys.stderr, flush=True)
        else:
            self.progress.line(self.format(record))


def hyper_parameters(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return what may change the outcome as one level of dotted names: ``{"model": "Toy", "optimizer.lr": 0.1, …}``."""
    groups = ("seed", "data", "model", "task", "optimizer", "scheduler", "strategy", "trainer")
    values = _flat({name: config[name] for name in groups})
    return {name: value for name, value in values.items() if not name.startswith(("data.val.", "data.test"))}


def overridden(overrides: Sequence[str]) -> list[str]:
    """Return the keys and groups that overrides set."""
    return [override.split("=")[0].lstrip("+~") for override in overrides]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return a nested config as one level of dotted names; a section itself is the last name of its ``_target_``."""
    values: dict[str, bool | int | float | str] = {}
    for name, value in config.items():
        if name == "_target_":
            values[prefix.removesuffix(".")] = value.rpartition(".")[2]
        elif isinstance(value, Mapping):
            values |= _flat(value, f"{prefix}{name}.")
        elif value is not None and name != "_partial_":
            values[f"{prefix}{name}"] = value if isinstance(value, (bool, int, float)) else str(value)
    return values
