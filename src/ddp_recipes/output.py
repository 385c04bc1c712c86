"""All that a run shows and leaves behind. Rank 0 writes it; other ranks send their warnings to it."""

import logging
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf

from ddp_recipes._version import __version__
from ddp_recipes.build.observers import make_logger
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.checkpointing.manager import FileCheckpointer
from ddp_recipes.config.extras import by_path
from ddp_recipes.devices import peak_memory
from ddp_recipes.loggers import Logger
from ddp_recipes.loggers.base import Parameter
from ddp_recipes.reporting.logs import FAILURE, Console, ForwardHandler, LogFile, handling, hearing_forks
from ddp_recipes.reporting.progress import Progress, in_bytes, make_progress, number, table
from ddp_recipes.reporting.run_directory import RunDirectory, Summary, read_summary, recording, write_summary
from ddp_recipes.strategies.base import batch_norms
from ddp_recipes.tasks.task import Modes
from ddp_recipes.training.cadence import Cursor
from ddp_recipes.training.state import Metrics, Run

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Output:
    """Opened once all ranks are ready, closed however the run ends."""

    recipe: Recipe
    directory: RunDirectory | None  # claimed, on rank 0; ``None`` elsewhere
    opened: bool = False
    run: Run | None = None
    metrics: Metrics = field(default_factory=dict)
    written: list[Path] = field(default_factory=list)  # what a run is for, if that is a file
    logger: Logger = field(default_factory=Logger)
    progress: Progress = field(default_factory=Progress)
    _started: float = field(default_factory=time.monotonic)
    _stack: ExitStack = field(default_factory=ExitStack)

    def open(self, run: Run | None) -> None:
        """Begin to write; a training ``run`` gets its logger, progress and checkpointer."""
        recipe, job = self.recipe, self.recipe.job
        self.opened = True
        self.run = run
        if run is not None:
            self._make_checkpointer(run)
            run.replaced, run.seconds_lost = self._losses()
        if self.directory is None:
            self.hold(handling(ForwardHandler(recipe.control)))
            self.hold(hearing_forks())
            return
        again = recipe.resumes_in_place or read_summary(self.directory.path) is not None  # all may start from step 0
        quick = bool(recipe.request.trainer.fast_dev_run)
        config = OmegaConf.to_yaml(OmegaConf.create(dict(job.config)))
        self.directory.record(config, job.hydra)
        write_summary(self.directory.path, self.facts(None))  # "running", whatever an earlier start came to
        self.progress = make_progress(recipe.request.trainer.progress, sys.stdout)
        self._stack.callback(self.progress.stop)
        self.hold(handling(LogFile(self.directory.path, recipe.control)))
        self.hold(handling(Console(self.progress)))
        self.hold(hearing_forks())
        if job.regroup is None:  # else the rank that is replaced has shown it
            table("ddp_recipes " + __version__, self._start_rows(), sys.stdout)
        if job.regroup is None or job.regroup["states"]:
            for warning in recipe.warnings:
                log.warning("%s", warning)
        if not quick:
            # What an earlier start logged after its checkpoint comes again; without one, all of it.
            first = None if run is None or not again else run.cursor.step + 1 if run.cursor.step else 0
            self.logger = make_logger(recipe.loggers, job.directory, (recipe.state or {}).get("purge_step", first))
            self._stack.callback(self.logger.close)
            recipe.task.logger = self.logger
            self.logger.parameters(hyper_parameters(job.config) | {"world_size": recipe.world.world_size})
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", config)), default=0))  # which no value ends
            self.logger.text("config", f"{fence}yaml\n{config}\n{fence}")
            self._draw()
        if run is None:
            return
        run.logger, run.progress, run.note = self.logger, self.progress, self.note
        if recipe.state is not None:
            run.checkpointer.load_state(recipe.state["checkpointer"], run.cursor.step)
        if not quick and any(node.get("graph", False) for node in recipe.loggers.values()):
            sample = run.train.sample()
            if isinstance(sample, (tuple, list)):
                modes = Modes(recipe.task)
                self.logger.graph(recipe.task.model, sample[0])
                modes.restore()
            else:
                log.warning("The graph is not written: a batch is a %s, not inputs and targets.", type(sample).__name__)
        self.progress.start(recipe.length.total_steps, run.cursor.step, run.train.plan.global_batch_size)

    def _losses(self) -> tuple[int, float]:
        """Return how many ranks were replaced in this directory before, and the seconds that it took; on every rank."""
        job, state = self.recipe.job, self.recipe.state
        if job.regroup is not None and state is not None:
            return state["run"]["replaced"], state["run"]["seconds_lost"]

        def written() -> tuple[int, float]:
            found = read_summary(job.directory) or {}
            replaced, seconds = found.get("ranks_replaced"), found.get("seconds_lost")
            return replaced if isinstance(replaced, int) else 0, seconds if isinstance(seconds, float) else 0.0

        return self.recipe.control.of_main("losses of earlier starts", written)

    def note(self) -> None:
        """Write what the summary says by now: nobody may be left to write it later."""
        if self.directory is not None:
            with recording():
                write_summary(self.directory.path, self.facts(None), durable=False)

    def _make_checkpointer(self, run: Run) -> None:
        """Give a training run what writes its checkpoints, on the ranks that do."""
        recipe, world = self.recipe, self.recipe.world
        if not recipe.request.checkpoint.enabled or recipe.request.trainer.fast_dev_run:
            return
        folder = recipe.job.directory / "checkpoints"
        if ranks := recipe.strategy.settings.layout(world.world_size).writers:
            from ddp_recipes.checkpointing.sharded import Writers, begin, make_checkpointer

            start = recipe.control.of_main("name of this start", partial(begin, folder))
            writers = Writers(world.rank, ranks, start)
            if recipe.job.regroup is None:  # else the others have seen it
                writers.check(folder)
            run.checkpointer = make_checkpointer(folder, run.checkpoint, writers)
        elif world.is_main:
            run.checkpointer = FileCheckpointer(folder, run.checkpoint, background=world.world_size > 1)

    def finish(self, summary: Summary, cause: str | None = None) -> None:
        """Write the summary; show where things are and what came out, or why it failed."""
        self.progress.stop()
        if not self.opened or self.directory is None:
            return
        if cause is not None:
            logging.getLogger(FAILURE).error("%s", cause.rstrip())
        with nullcontext() if summary["status"] == "finished" else recording():
            write_summary(self.directory.path, summary)
            self.logger.finish(summary["status"])
        if cause is None:
            numbers = {name: value for name, value in summary["metrics"].items() if not name.startswith("train/")}
            params = hyper_parameters(self.recipe.job.config) | {"world_size": summary["world_size"]}
            self.logger.hparams(params, numbers or summary["metrics"], chosen=overridden(self.recipe.job.overrides))
            self.logger.flush()
            table(f"{summary['status']} in {summary['wall_time_s']:.1f} s", self._end_rows(summary), sys.stdout)

    def wait_for_save(self) -> None:
        """Wait for a checkpoint that is still being written."""
        if self.run is not None:
            self.run.checkpointer.wait(None)

    def hold(self, context: AbstractContextManager[T]) -> T:
        """Enter a context that lasts until :meth:`close`."""
        return self._stack.enter_context(context)

    def close(self) -> None:
        """Close files, remove the log handlers; free the run, which refers to this by :meth:`note`."""
        with recording():
            self._stack.close()
        if self.directory is not None:
            self.directory.close()
        self.run = None

    def facts(self, weights_sha256: str | None) -> Summary:
        """Return what ``summary.json`` says of any run, however it ended.

        Args:
            weights_sha256: of the model's weights; ``None`` where this rank does not know it.
        """
        run, recipe, world = self.run, self.recipe, self.recipe.world
        cursor = Cursor(**(recipe.state or {}).get("cursor", {}))
        steps: Sequence[float] = ()
        metrics = self.metrics
        best = last = rate = None
        monitor = recipe.monitor if run is None else run.monitor
        began = self._started if run is None else min(self._started, run.began)  # another rank's, which this replaces
        if run is not None:
            cursor, steps, metrics = run.cursor, run.clock.step_seconds(), run.metrics | self.metrics
            best, last = run.checkpointer.best, run.checkpointer.last
            if run.clock.train_seconds:
                rate = (cursor.samples_seen - run.samples_before) / run.clock.train_seconds
        return {
            "status": "running",
            "error": None,
            "mode": recipe.request.run.mode,
            "world_size": world.world_size,
            "nnodes": world.nnodes,
            "devices_per_replica": recipe.devices_per_replica,
            "split": [stage.first for stage in recipe.built.stages[1:]],
            "strategy": recipe.request.strategy.name,
            "device": "cpu" if recipe.devices.name == "CPU" else recipe.devices.name,
            "global_step": cursor.step,
            "epoch": cursor.epoch,
            "metrics": metrics,
            "monitor": monitor,
            "objective": metrics.get(monitor),
            "overrides": list(recipe.job.overrides),
            "best_checkpoint": None if best is None else str(best),
            "last_checkpoint": None if last is None else str(last),
            "samples_seen": cursor.samples_seen,
            "ranks_replaced": 0 if run is None else run.replaced,
            "seconds_lost": 0.0 if run is None else run.seconds_lost,
            "samples_per_second": rate,
            "step_time_ms": statistics.median(steps) * 1e3 if steps else None,
            **self._flops(rate),
            "peak_memory_bytes": None if run is None else peak_memory(run.devices),
            "wall_time_s": time.monotonic() - began,
            "weights_sha256": weights_sha256,
            "run_directory": str(recipe.job.directory),
            "torch": torch.__version__,
            "ddp_recipes": __version__,
            "python": platform.python_version(),
        }

    def _flops(self, rate: float | None) -> dict[str, float | None]:
        """Return the operations of an optimizer step, and the fraction of what devices can do that training took."""
        found: dict[str, float | None] = {"flops_per_step": None, "mfu": None}
        if self.run is not None and self.run.flops is not None:
            samples = self.run.train.plan.global_batch_size * self.run.trainer.accumulate_grad_batches
            found["flops_per_step"] = self.run.flops.of_sample * samples
            found["mfu"] = None if rate is None else self.run.flops.per_second(rate).get("mfu")
        return found

    def _draw(self) -> None:
        """Leave the pictures of how the model is laid out."""
        job, settings = self.recipe.job, self.recipe.request.strategy
        for draw in self.recipe.built.pictures:
            draw(job.directory, self.logger)
        for path in settings.pictures if self.run is not None else ():
            by_path(path)(job.directory, self.logger, settings)

    def _start_rows(self) -> list[tuple[str, str]]:
        recipe, world, settings = self.recipe, self.recipe.world, self.recipe.request.strategy
        count = sum(parameter.numel() for parameter in recipe.task.parameters())
        backend = recipe.devices.backend + (" and shared memory" if recipe.strategy.shares_memory else "")
        note = "; batch norm takes its statistics from each" if batch_norms(recipe.task) else ""
        rows = [
            ("model", f"{type(recipe.task.model).__name__}, {count:,} parameters"),
            ("strategy", settings.name + (f" over {backend}" if world.world_size > 1 else "")),
            ("replicas x devices", f"{recipe.replicas} x {recipe.devices_per_replica} ({recipe.devices.name})"),
            *((f"stage {number}", str(stage)) for number, stage in enumerate(recipe.built.stages)),
        ]
        if (micro_batches := recipe.request.model.micro_batches) > 1:
            rows.append(("micro-batches", f"{micro_batches} a batch{note}"))
        rows += settings.rows(note)
        if self.run is not None:
            plan, steps = self.run.train.plan, recipe.length.total_steps
            shards = f" in {plan.num_shards} shards" if plan.num_shards > world.world_size else ""
            epochs = self.run.trainer.max_epochs
            unknown = "until max_time" if epochs is None else f"of {epochs} epoch{'' if epochs == 1 else 's'}"
            end = unknown if steps is None else f"{steps:,}"
            rows += [
                ("data", self.run.train.length),
                ("global batch", f"{plan.global_batch_size:,} samples{shards}"),
                ("steps", f"{end}, from {self.run.cursor.step:,}"),
            ]
        if recipe.checkpoint_path is not None:
            rows.append(("checkpoint", self._shown(recipe.checkpoint_path)))
        return [*rows, ("run directory", self._shown(recipe.job.directory))]

    def _end_rows(self, summary: Summary) -> list[tuple[str, str]]:
        metrics = sorted(summary["metrics"].items(), key=lambda item: item[0].startswith("train/"))
        told = ("train/epoch", "train/peak_memory_bytes")  # in other rows, or words
        rows = [(name, number(value)) for name, value in metrics if name not in told]
        if summary["step_time_ms"] is not None:
            rows.append(("median step", f"{summary['step_time_ms']:.2f} ms"))
        if (peak := summary["peak_memory_bytes"]) is not None:
            rows.append(("peak memory", f"{in_bytes(peak)} of a device"))
        for name in ("best_checkpoint", "last_checkpoint"):
            if summary[name]:
                rows.append((name.replace("_", " "), self._shown(summary[name])))
        if self.written:  # and nothing is logged
            return [*rows, *(("written", self._shown(path)) for path in self.written)]
        commands = self.logger.see_with(shlex.quote(self._shown(summary["run_directory"]))) or ""
        return [*rows, *(("see it with", command) for command in commands.splitlines())]

    def _shown(self, path: str | Path) -> str:
        """Return a path as short as it can be typed here, or in full where here is the run directory itself."""
        try:
            here = Path.cwd()
        except FileNotFoundError:  # it has been removed since
            return str(path)
        if Path(path).is_relative_to(here) and not here.is_relative_to(self.recipe.job.directory):
            return str(Path(path).relative_to(here))
        return str(path)


GROUPS = ("seed", "data", "model", "task", "optimizer", "scheduler", "strategy", "trainer")  # may change the outcome


def hyper_parameters(config: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return them as one level of dotted names: ``{"model": "Toy", "optimizer.lr": 0.1, …}``."""
    values = _flat({name: config[name] for name in GROUPS})
    return {name: value for name, value in values.items() if not name.startswith(("data.val.", "data.test"))}


def overridden(overrides: Sequence[str]) -> list[str]:
    """Return the keys and groups that overrides set."""
    return [override.split("=")[0].lstrip("+~") for override in overrides]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Parameter]:
    """Return a nested config as one level of dotted names; a section itself is the last name of its ``_target_``."""
    values: dict[str, Parameter] = {}
    for name, value in config.items():
        if name == "_target_":
            values[prefix.removesuffix(".")] = str(value).rpartition(".")[2]
        elif isinstance(value, Mapping):
            values |= _flat(value, f"{prefix}{name}.")
        elif value is not None and name != "_partial_":
            values[f"{prefix}{name}"] = value if isinstance(value, (bool, int, float)) else str(value)
    return values
