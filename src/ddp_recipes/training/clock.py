"""How long steps take."""

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import torch

from ddp_recipes import devices

_STEPS = 10_000  # the newest, of which a run tells the median


class Clock:
    """Times steps, each from the end of the one before or from :meth:`start`, whichever is later."""

    def __init__(self) -> None:
        self.train_seconds = 0.0  # in steps alone
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._last = 0.0

    def start(self) -> None:
        """Begin anew: what was done since the last step is no part of the next."""
        self._last = time.perf_counter()

    def step(self) -> None:
        """End a step."""
        now = time.perf_counter()
        self._add(now - self._last)
        self._last = now

    def step_seconds(self) -> list[float]:
        """Return the seconds of the newest steps."""
        return list(self._steps)

    def _add(self, seconds: float) -> None:
        self._steps.append(seconds)
        self.train_seconds += seconds


class DeviceClock(Clock):
    """Times steps on an accelerator, which works on them after they were enqueued: by events in its stream."""

    _UNREAD = 1000  # events; the first of so many has passed, so that reading it waits for nothing

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._events: deque[torch.Event] = deque()

    def start(self) -> None:
        """Begin anew."""
        self.step_seconds()
        self._events.clear()
        self._record()

    def step(self) -> None:
        """End a step."""
        self._record()
        if len(self._events) > self._UNREAD:
            self._read()

    def step_seconds(self) -> list[float]:
        """Return the seconds of the newest steps. Waits for the device, unless that has failed for good."""
        with suppress(RuntimeError):  # which every later call on it raises again: the first one is to be shown
            while len(self._events) > 1:
                self._read()
        return super().step_seconds()

    def _record(self) -> None:
        self._events.append(devices.record(self.device, timed=True))

    def _read(self) -> None:
        began, ended = self._events.popleft(), self._events[0]
        ended.synchronize()
        self._add(began.elapsed_time(ended) / 1e3)


def make_clock(device: torch.device) -> Clock:
    """Return the clock for steps that end on a device."""
    return DeviceClock(device) if devices.is_accelerator(device) else Clock()


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a model's training.

    Attributes:
        of_sample: forward and backward.
        peak: a second, of all devices together; ``None``: not known.
    """

    of_sample: float
    peak: float | None

    def per_second(self, samples: float) -> dict[str, float]:
        """Return what so many samples a second come to: operations, and their fraction of the peak."""
        flops = self.of_sample * samples
        return {"flops_per_second": flops} | ({} if self.peak is None else {"mfu": flops / self.peak})


class Rate:
    """Samples a second since it was last asked; ``samples`` were seen before."""

    def __init__(self, samples: int) -> None:
        self._asked, self._samples = time.perf_counter(), samples

    def per_second(self, samples: int) -> float:
        """Return the rate, given how many were seen until now."""
        now = time.perf_counter()
        rate = (samples - self._samples) / (now - self._asked)
        self._asked, self._samples = now, samples
        return rate
