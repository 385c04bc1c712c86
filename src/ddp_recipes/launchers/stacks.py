"""The Python stacks of processes that no longer respond, which they write on SIGUSR2."""

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

ANSWER_S = 1.0


def write_on_request(file: int) -> None:
    """Have this process write the stacks of all its threads to a file descriptor whenever it gets SIGUSR2."""
    faulthandler.register(signal.SIGUSR2, file, all_threads=True)


def request(processes: Mapping[int, IO[bytes]]) -> dict[int, str]:
    """Request the stacks of processes; return what is in the file of each a second later at most.

    A stopped process is continued for that: it takes no signal before.
    """
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
            os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline and not all(os.fstat(file.fileno()).st_size for file in processes.values()):
        time.sleep(0.02)
    for file in processes.values():
        file.seek(0)
    return {pid: file.read().decode(errors="replace") for pid, file in processes.items()}
