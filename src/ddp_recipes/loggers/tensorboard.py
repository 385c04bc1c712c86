"""TensorBoard."""

from __future__ import annotations

import contextlib
import io
import logging
import struct
import time
import warnings
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddp_recipes._compat.torch_ import file_writer
from ddp_recipes.devices import random_kept
from ddp_recipes.loggers.base import Logger, Parameter

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

HELD_S = 1.0  # that points wait for others: to wake the thread that writes for each of them would delay the loop


def _await_later_name(directory: Path) -> None:
    """Wait, for a second at most, until a new event file comes after those that are there.

    TensorBoard reads them in the order of their names, which begin with the second that they were made in and go on
    with a process id. A run that was killed may go on sooner; its points would be purged before they are read.
    """
    made = (path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*"))
    newest = max((int(second) for second in made if second.isdecimal()), default=0)
    time.sleep(min(1.0, max(0.0, newest + 1 - time.time())))


class TensorBoardLogger(Logger):
    """Write exactly one event file into ``directory``.

    Args:
        purge_step: on resume, hide the points that an earlier start logged at this step and later; they come again.
        graph: whether to write the model's graph.
        flush_secs: how long, in seconds, points may wait in memory.
    """

    folder: ClassVar[str] = "tensorboard"

    def __init__(
        self, directory: str | Path, purge_step: int | None = None, graph: bool = False, flush_secs: int = 30
    ) -> None:
        # Only the rank that writes pays for this import.
        from torch.utils.tensorboard import SummaryWriter

        _await_later_name(Path(directory))
        self._writer = SummaryWriter(log_dir=str(directory), purge_step=purge_step, flush_secs=flush_secs)
        self._file = file_writer(self._writer)
        self._graph = graph
        self._step = self._first = purge_step or 0
        self._resumed = (purge_step or 1) > 1  # at 1 there is nothing from before
        self._latest: dict[str, float] = {}
        self._directory = str(directory)
        self._earlier: dict[str, set[int]] = {}  # numbers of batches by tag, of an earlier start
        self._held: list[tuple[float, int, Mapping[str, float]]] = []  # points of the last second: time, step, values

    @property
    def experiment(self) -> Any:
        return self._writer

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._step = step
        self._hold(time.time(), step, values)

    def of_batch(self, values: Mapping[str, float], batch: int, step: int) -> None:
        self.go_on({tag: batch for tag in values if tag not in self._earlier})
        self._hold(time.time(), batch, {tag: value for tag, value in values.items() if batch not in self._earlier[tag]})

    def go_on(self, batches: Mapping[str, int]) -> None:
        """Record points of an earlier start once more that this start has hidden, and that come from no later batch."""
        self._earlier |= {tag: set() for tag in batches}
        if not (self._resumed and batches):
            return
        for tag in batches.keys() & {*self._every.Tags()["scalars"]}:
            points = {point.step: point for point in self._every.Scalars(tag)}
            self._earlier[tag] = {number for number in points if number < self._first}
            for number, point in points.items():
                if self._first <= number < batches[tag]:
                    self._hold(point.wall_time, number, {tag: point.value})

    @cached_property
    def _every(self) -> Any:
        """All points of the run, those as well that a start has hidden: read once, for validation sets come in turn."""
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

        return EventAccumulator(self._directory, size_guidance={SCALARS: 0}, purge_orphaned_data=False).Reload()

    def _hold(self, when: float, number: int, values: Mapping[str, float]) -> None:
        self._held.append((when, number, dict(values)))
        self._latest.update(values)
        if time.time() - self._held[0][0] > HELD_S:
            self._send()

    def _send(self) -> None:
        """Give what is held to the thread that writes."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for when, step, values in self._held:
            # One event for all of them: `add_scalar` would write one each.
            points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._file.add_summary(Summary(value=points), step, when)
        self._held.clear()

    def text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, text)

    def hparams(
        self, params: Mapping[str, Parameter], metrics: Mapping[str, float], chosen: Collection[str] = ()
    ) -> None:
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        # Not `SummaryWriter.add_hparams`: that writes a second event file, in a folder of its own.
        experiment, *session = hparams(dict(params), dict(metrics))  # type: ignore[no-untyped-call]
        # The tab opens with five parameters: those marked as differing, then by name.
        plugin_data = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(plugin_data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in chosen
        plugin_data.content = content.SerializeToString()
        for summary in (experiment, *session):
            self._file.add_summary(summary)
        # The HParams tab shows the latest point of each metric, so let that be the one given here. What has not been
        # logged since a resume has its latest point from before it.
        logged = self._latest if self._resumed else metrics
        unseen = {tag: value for tag, value in metrics.items() if tag in logged and self._latest.get(tag) != value}
        if unseen:
            self.scalars(unseen, self._step)

    def graph(self, model: nn.Module, inputs: Tensor) -> None:
        if not self._graph:
            return
        import torch

        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers(), inputs)}
        # Tracing runs the model: it must cost the run neither its random numbers, nor its life, nor its terminal.
        try:
            with (
                random_kept(devices),
                torch.no_grad(),
                warnings.catch_warnings(action="ignore"),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                self._writer.add_graph(model, inputs)
        except Exception as error:  # noqa: BLE001 - tracing runs the user's model, which may raise anything
            reason = str(error).strip().splitlines() or [type(error).__name__]
            log.warning("The graph of %s is not written, it cannot be traced: %s", type(model).__name__, reason[0])

    def image(self, tag: str, png: bytes) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # Not `SummaryWriter.add_image`: that takes the picture apart and packs it again.
        width, height = struct.unpack(">II", png[16:24])  # where every PNG has them
        content = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._file.add_summary(Summary(value=[Summary.Value(tag=tag, image=content)]), self._step)

    def flush(self) -> None:
        self._send()
        self._writer.flush()

    def close(self) -> None:
        self._send()
        self._writer.close()

    def see_with(self, run_directory: str) -> str:
        return f"tensorboard --logdir {run_directory}"
