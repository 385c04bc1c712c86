"""A rank of a competitor: waits for its turn, times it and reports it.

Standard library only, so that start-up and memory can be measured through it as well.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

SEAT = "DDP_RECIPES_BENCH_SEAT"
HEAVY = ("torchvision", "tensorboard", "sklearn", "torchmetrics")  # seconds and megabytes, for those who need them


@dataclass(frozen=True)
class Seat:
    """What a competitor's processes are told, through the environment.

    Attributes:
        name: of the competitor.
        address: Unix socket of the referee.
        workload: what it trains; see ``workloads.py``.
        device: ``cpu`` or ``cuda``.
        shuffle: false: samples in the data set's order, so that all competitors see the same batches.
        epoch_steps: steps an epoch, where a measurement needs them to be few; ``None``: the workload's own.
        max_steps: where a run ends that no referee ends.
        save_every: steps from one checkpoint to the next, where a run is to resume.
        option: a variant of the competitor.
        directory: a folder of its own for what it writes.
    """

    name: str
    address: str = ""
    workload: str = "toy"
    ranks: int = 1
    device: str = "cpu"
    shuffle: bool = True
    epoch_steps: int | None = None
    max_steps: int = 10**9
    save_every: int = 0
    option: str = ""
    directory: str = ""

    @classmethod
    def mine(cls) -> "Seat":
        """Return this process's."""
        return cls(**json.loads(os.environ[SEAT]))

    def environ(self) -> dict[str, str]:
        """Return the variable that says all this."""
        return {SEAT: json.dumps(asdict(self))}


class Player:
    """One rank at the referee's table.

    Args:
        level: measures how far the model has come, between turns; rank 0's counts.
        everywhere: whether it takes all ranks.
        wait: waits for the device, where it works on its own.
    """

    def __init__(
        self,
        seat: Seat,
        rank: int,
        level: Callable[[], float] | None = None,
        wait: Callable[[], None] | None = None,
        everywhere: bool = False,
    ) -> None:
        self.seat, self.rank, self.wait = seat, rank, wait
        self.level = level if rank == 0 or everywhere else None
        self.extra: dict[str, Any] = {}  # goes with the next report
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(seat.address)
        self._channel = connection.makefile("rw")
        self._steps = 0
        self._times: list[float] = []
        self._cpu = 0.0
        self._send({"name": seat.name, "rank": rank})

    def begin(self) -> bool:
        """Wait for the first turn, right before the first step; return whether there is one."""
        return self._next()

    def step(self) -> bool:
        """Note that a step is done; at the end of a turn report it and wait. Return whether to go on.

        It costs a tenth of a microsecond, but for the last step of a turn.
        """
        self._times.append(time.perf_counter())
        return len(self._times) <= self._steps or self._hand_over()

    def _hand_over(self) -> bool:
        if not self._steps:  # it was told to stop, and went on to the end of something
            return False
        if self.wait is not None:
            self.wait()
        end, now = time.perf_counter(), time.monotonic()
        laps = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        report = {
            "steps": self._steps,
            "seconds": end - self._times[0],
            "cpu_seconds": time.process_time() - self._cpu,  # of all threads
            "stall": max(laps) - statistics.median(laps),
            "at": now,  # the same clock in every process
            "level": self.level() if self.level is not None else None,
            "peak": peak_memory(),
            "heavy": [name for name in HEAVY if name in sys.modules],
            **self.extra,
        }
        self._send(report)
        return self._next()

    def _next(self) -> bool:
        line = self._channel.readline()
        self._steps = json.loads(line)["steps"] if line else 0
        if self.wait is not None:
            self.wait()
        self._cpu = time.process_time()
        self._times = [time.perf_counter()]
        return self._steps > 0

    def _send(self, report: Mapping[str, Any]) -> None:
        self._channel.write(json.dumps(report) + "\n")
        self._channel.flush()


def peak_memory() -> int:
    """Return the most memory that was resident in this process so far, in bytes; 0 where Linux's ``/proc`` is not."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0
