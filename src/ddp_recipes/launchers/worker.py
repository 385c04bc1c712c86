"""One local rank: ``python -m ddp_recipes.launchers.worker <report pipe> <stacks file> [<socket, rank 0>]``."""

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

from ddp_recipes.errors import Preempted, RecipeError, RequestError, RunFailed
from ddp_recipes.job import Job
from ddp_recipes.world import World


def main() -> None:
    """Read a job from standard input, run it, report how it ended, and leave."""
    pipe, stacks, *listener = map(int, sys.argv[1:])
    die_with_parent()
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
    job = Job.from_json(sys.stdin.buffer.readline().decode())
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    report = run(job, World.from_env(os.environ), listener[0] if listener else None)
    sys.stdout.flush()
    sys.stderr.flush()
    with os.fdopen(pipe, "w") as file:
        file.write(json.dumps(report) + "\n")
    atexit._run_exitfuncs()
    os._exit(report["exit_status"])  # taking torch apart would take another second


def run(job: Job, world: World, listener: int | None) -> dict[str, Any]:
    """Run the job and return how it ended, in words that go through a pipe."""
    try:
        from torch.distributed import TCPStore  # the first import of torch: errors in it are reported, too

        from ddp_recipes import rank

        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world.world_size,
            world.is_main,
            timeout=timedelta(seconds=300),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        return {"kind": "summary", "summary": rank.run(job, world, store), "exit_status": 0}
    except RequestError as error:
        return {"kind": "refused", "message": str(error), "exit_status": error.exit_status}
    except Preempted as error:
        words = {"kind": "preempted", "message": str(error), "checkpoint": error.checkpoint}
        return words | {"exit_status": error.exit_status}
    except BaseException as error:
        text = str(error) if isinstance(error, RecipeError) else traceback.format_exc()
        secondary = isinstance(error, RunFailed) and error.rank not in (None, world.rank)
        return {"kind": "failed", "message": text, "cause": not secondary, "time": time.time(), "exit_status": 1}


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it dies, also where it cannot run."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _die_with_launcher() -> None:
    """Wait for the end of standard input, which is the end of the launcher, whatever ended it."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
