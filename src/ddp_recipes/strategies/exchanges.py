"""What ranks exchange by collectives that raise nothing when a rank is lost: those of NCCL wait on the device for ever.

Whoever notices the loss aborts them from another thread. The device then goes on with whatever they have left.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread

import torch
import torch.distributed as dist

from ddp_recipes.devices import is_accelerator, record
from ddp_recipes.errors import RequestError

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# Threads of torch's end the process, by SIGABRT, before anybody could say which rank it waited for: where a collective
# takes too long or is aborted, where the device has an error, and where one of them is not heard of for minutes. Before
# that they wait for a minute, to write what is written here.
SETTINGS = {
    HANDLING: "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
LOOK_S = 5e-5  # between looks at the device, of who waits for it
WATCH_S = 1.0  # of who watches it


def leave_failures_to_us() -> None:
    """Set what groups of NCCL read when they are made, unless the user has.

    Raises:
        RequestError: torch is to abort collectives by itself, and to tell nobody.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if os.environ[HANDLING] == "2":
        raise RequestError(
            f"{HANDLING}=2 has torch abort collectives without an error, and a run would go on with what they leave. "
            f"Leave the variable out."
        )


class Exchanges:
    """Keeps what was aborted from being used. Without ``abort`` there is nothing that could be.

    Args:
        devices: that collectives are enqueued on.
        timeout_s: how long one may take.
        abort: ends those that are under way.
        settles: whether what was aborted may be used, because this process goes on after the loss of a rank.

    Attributes:
        lost: whether a rank is lost, so that any error may come of that.
        late: whether that was noticed here: the devices came no further for as long as a collective may take.
        recorders: of what is exchanged, which note it as long as they are kept.
    """

    def __init__(
        self,
        devices: Sequence[torch.device] = (),
        timeout_s: float = 0.0,
        abort: Callable[[], None] | None = None,
        settles: bool = True,
    ) -> None:
        self._devices = [device for device in devices if is_accelerator(device)]
        self._timeout_s, self._abort, self._settles = timeout_s, abort, settles
        self._ends = Lock()  # torch does not expect two threads to abort one group
        self._over, self._seen = Event(), time.monotonic()
        self.lost = self.late = False
        self.recorders: list[object] = []
        if self._devices and abort is not None:
            Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """Abort what is under way; any thread may call it, and again."""
        self.close()
        if self._abort is not None:
            self.lost = True
            with self._ends:
                self._abort()

    def close(self) -> None:
        """Watch the devices no more: the group is left."""
        self._over.set()
        self.recorders = []

    def synchronize(self) -> None:
        """Wait, where this process goes on after a loss, until the devices have all that was exchanged.

        Called before it is used.

        Raises:
            DistBackendError: they have not in time, or a rank was lost meanwhile.
        """
        self._seen = time.monotonic()
        if self._settles and self._abort is not None:
            marks = [record(device) for device in self._devices]
            while not all(mark.query() for mark in marks):
                if time.monotonic() > self._seen + self._timeout_s:
                    raise self._timed_out()
                time.sleep(LOOK_S)
        if self.late:
            raise self._timed_out()
        if self.lost:  # looked at last: it is set before anything is aborted
            raise dist.DistBackendError("A rank was lost, and what ranks exchanged was aborted.")

    def _timed_out(self) -> Exception:
        return dist.DistBackendError(f"Timed out waiting {self._timeout_s:g} s for what ranks exchange.")

    def _watch(self) -> None:
        """Abort what the devices wait for, as this process may, without an end: in any code that needs a value.

        They are asked nothing as long as the process comes by :meth:`synchronize`.
        """
        patience = self._timeout_s / 2
        look_s = min(patience, WATCH_S)
        while not self._over.wait(look_s):
            if time.monotonic() < self._seen + patience:
                continue
            answered, asked = Event(), time.monotonic()
            Thread(target=self._ask, args=(answered, look_s), daemon=True).start()
            while not answered.wait(look_s):
                if self._over.is_set():
                    return
                if time.monotonic() > asked + patience:
                    self.late = True
                    self.end()
                    return

    def _ask(self, answered: Event, look_s: float) -> None:
        """Say once the devices have done what is enqueued until now.

        On a thread of its own: a device takes no more work, an event's neither, while as much waits as it has room for.
        """
        with suppress(RuntimeError):  # an error of a device, which the process gets as well
            marks = [record(device) for device in self._devices]
            while not all(mark.query() for mark in marks):
                time.sleep(look_s)
        answered.set()
