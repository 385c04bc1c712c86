"""What ranks exchange by collectives that raise nothing when a rank is lost: those of NCCL wait on the device for ever.

Whoever notices the loss aborts them from another thread. The device then goes on with whatever they have left.
"""

import os
import time
from collections.abc import Callable, Sequence
from threading import Lock

import torch
import torch.distributed as dist

from ddp_recipes.devices import is_accelerator, record
from ddp_recipes.errors import RequestError

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# Else a thread of torch's ends this process because of collectives that were aborted, or makes it wait for a minute.
SETTINGS = {HANDLING: "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
LOOK_S = 5e-5  # between looks at the device


def leave_aborts_to_us() -> None:
    """Set what groups of NCCL read when they are made, unless the user has.

    Raises:
        RequestError: torch is to abort collectives by itself, and to tell nobody.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if os.environ[HANDLING] == "2":
        raise RequestError(
            f"{HANDLING}=2 has torch abort collectives without an error, and a run with launcher.replace_ranks would "
            f"go on with what they leave. Leave the variable out."
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
        self.lost = False

    def end(self) -> None:
        """Abort what is under way; any thread may call it, and again."""
        if self._abort is not None:
            self.lost = True
            with self._ends:
                self._abort()

    def settle(self) -> None:
        """Wait until the devices have all that was exchanged; called before it is used.

        Raises:
            DistBackendError: they have not in time, or a rank was lost meanwhile.
        """
        if self._abort is None or not self._settles:
            return
        marks = [record(device) for device in self._devices]
        deadline = time.monotonic() + self._timeout_s
        while not all(mark.query() for mark in marks):
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"Timed out waiting {self._timeout_s:g} s for what ranks exchange.")
            time.sleep(LOOK_S)
        if self.lost:  # looked at last: it is set before anything is aborted
            raise dist.DistBackendError("A rank was lost, and what ranks exchanged was aborted.")
