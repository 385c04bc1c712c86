"""One rank of a job, in a process that was started for it."""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import IO, NoReturn

from ddp_recipes.launchers.reports import RankReport
from ddp_recipes.launchers.stacks import write_on_request
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job
from ddp_recipes.runtime.process import die_with_parent, ignore, leave, loading, set_name
from ddp_recipes.runtime.world import World


def work(lifeline: int, reports: int, stacks: int, listener: int | None = None) -> NoReturn:
    """Read a job, run it as a local rank, report how it ended, and exit.

    Args:
        lifeline: pipe that brings the job, one line; its end is the launcher's end.
        reports: pipe for the report, one line.
        stacks: file for the Python stacks that SIGUSR2 requests.
        listener: socket that rank 0's store listens on.
    """
    die_with_parent()
    world = World.from_env(os.environ)
    set_name(f"rank {world.rank}")
    write_on_request(stacks)
    pipe = os.fdopen(lifeline, "rb")
    job = replace(Job.from_json(pipe.readline().decode()), last=True)
    threading.Thread(target=_die_with_launcher, args=[pipe], daemon=True).start()
    with os.fdopen(reports, "w", buffering=1) as file:
        report = run(job, world, listener, lambda place: print(json.dumps({"place": place}), file=file))
        ignore(ASKS_TO_STOP)  # the run has ended
        sys.stdout.flush()
        sys.stderr.flush()
        print(report.to_json(), file=file)
    leave(report.exit_status)


def run(job: Job, world: World, listener: int | None, at: Callable[[str], None] = lambda place: None) -> RankReport:
    """Run the job as one of its ranks, which meet at ``MASTER_ADDR:MASTER_PORT``; return how it ended.

    Args:
        listener: socket that rank 0's store listens on; without one it opens the port itself.
        at: called when this rank is at the store's ``door``, when it is ``inside``, and when it has ``joined`` the
            others. The way in has no timeout of its own: a rank 0 that is stopped there holds up the others, with their
            interpreters.
    """
    try:
        with loading():
            from torch.distributed import TCPStore  # the first import of torch: errors in it are reported, too

            from ddp_recipes import rank

        at("door")
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world.world_size,
            world.is_main,
            timeout=timedelta(seconds=300),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        at("inside")
        return RankReport.of_summary(world.rank, rank.run(job, world, store, joined=partial(at, "joined")))
    except BaseException as error:
        return RankReport.of_error(world.rank, error)


def _die_with_launcher(pipe: IO[bytes]) -> None:
    """Wait for the end of the lifeline, which is the end of the launcher, whatever ended it."""
    while pipe.read(1):
        pass
    os._exit(1)
