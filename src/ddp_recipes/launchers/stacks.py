"""The Python stacks of processes that no longer respond, which they write on SIGUSR2, before they die of it."""

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from ddp_recipes.runtime.process import is_running

ANSWER_S = 1.0


def write_at_death(file: int) -> None:
    """Have this process write the stacks of all its threads to a file descriptor, and die, when it gets SIGUSR2."""
    faulthandler.register(signal.SIGUSR2, file, all_threads=True, chain=True)  # on to the default, which is to die


def request(processes: Mapping[int, IO[bytes]]) -> dict[int, str]:
    """End processes; return what is in the file of each once they are dead, a second later at most.

    A stopped process is continued for that, since it takes no signal before, and comes to nothing else.
    """
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
            os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + ANSWER_S
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for file in processes.values():
        file.seek(0)
    return {pid: file.read().decode(errors="replace") for pid, file in processes.items()}
