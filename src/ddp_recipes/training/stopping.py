"""When to stop before the end: on a signal, or when the time is over. All ranks stop at one step."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

import torch

from ddp_recipes.runtime.job import ASKS_TO_STOP, STOPPING
from ddp_recipes.runtime.world import World

_AGREE_EVERY_S = 1.0


class Pace:
    """How many steps, or batches of a validation, there are between two exchanges: about a second's, the same on ranks.

    Attributes:
        due: the step or batch at which ranks exchange next.
    """

    def __init__(self) -> None:
        self.due = 0
        self._interval = 1
        self._former: tuple[int, float] | None = None  # step and time of the last exchange

    def begin(self, step: int, ahead: bool) -> None:
        """Forget what was done since the last exchange; the next one is now, or about a second ahead."""
        self.due = step + self._interval if ahead else step
        self._former = (step, time.monotonic()) if ahead else None

    def interval(self, step: int) -> int:
        """Return the number of steps until the next exchange, by how long they took since the last one."""
        now = time.monotonic()
        former, self._former = self._former, (step, now)
        if former is None or step == former[0]:
            return self._interval
        seconds_a_step = (now - former[1]) / (step - former[0])
        return max(1, min(int(_AGREE_EVERY_S / seconds_a_step), 8 * (step - former[0])))

    def go_on(self, step: int, interval: int) -> None:
        """Take rank 0's interval."""
        self._interval, self.due = interval, step + interval


class ValidationStopped(Exception):
    """Ends a validation, on every rank before the same batch: a signal stops the run."""


class StopController:
    """Decides on one step at which all ranks stop, without a collective in every step.

    Signals only set a flag. Ranks exchange flags about once a second: each exchange also carries, from rank 0, the
    number of steps until the next one, so that all ranks hold it at the same step. One process looks at every step.
    So do validations, by their batches, and what takes long between steps is followed by an exchange.

    Use it as a context manager: handlers are in place inside (in the main thread only), and put back after.
    """

    def __init__(
        self,
        world: World,
        total: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        max_time: float | None,
        moves: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world = world
        self.total = total
        self.device = device
        self._moves = moves  # whether all are to leave, for others to go on
        self.deadline = None if max_time is None else time.monotonic() + max_time
        self.cause = ""  # of a stop by a signal: which one it was
        self.steps, self.batches = Pace(), Pace()
        self._signal: signal.Signals | None = None
        self._interrupts = 0
        self._former: dict[int, object] = {}

    def reason(self, step: int) -> str | None:
        """Return ``"signal"``, ``"max_time"`` or ``"moved"`` if the run stops at this step, the same on every rank."""
        return self._exchange(step, self.steps)

    def check_validation(self, batch: int) -> None:
        """Look before a batch of a validation, by its number over all data sets.

        Raises:
            ValidationStopped: a signal stops the run.
        """
        if batch == 0:
            self.batches.begin(0, ahead=True)
        if self._exchange(batch, self.batches) == "signal":
            raise ValidationStopped

    def _exchange(self, step: int, pace: Pace) -> str | None:
        if step < pace.due:
            return None
        signalled = self._signal is not None
        late = self.deadline is not None and time.monotonic() >= self.deadline
        moves = self._moves()
        self.cause = "" if self._signal is None else self._signal.name
        if self.world.world_size > 1:
            flags = torch.tensor(
                [
                    *(self._signal == number for number in STOPPING),
                    self.world.is_main and late,
                    moves,
                    pace.interval(step) if self.world.is_main else 0,
                ],
                dtype=torch.int64,
                device=self.device,
            )
            *ranks, lates, moved, interval = self.total(flags[None]).tolist()
            taken = [number.name for number, count in zip(STOPPING, ranks, strict=True) if count]
            signalled, late, moves = bool(taken), lates > 0, moved > 0
            if taken and not self.cause:
                self.cause = f"{taken[0]} to another rank"
            pace.go_on(step, interval)
        return "signal" if signalled else "max_time" if late else "moved" if moves else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number)
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt

    def __enter__(self) -> "StopController":
        if threading.current_thread() is threading.main_thread():
            for number in ASKS_TO_STOP:
                self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            if signal.getsignal(number) == self._handle:  # else somebody wants another one from here on
                signal.signal(number, handler)  # type: ignore[arg-type]
