"""One rank of a job, in a process that was started for it."""

import os
import sys
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from ddp_recipes.launchers.lifeline import Lifeline
from ddp_recipes.launchers.reports import RankReport
from ddp_recipes.launchers.stacks import write_at_death
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job
from ddp_recipes.runtime.process import die_with_parent, ignore, ignore_broken_pipe, leave, loading, set_name
from ddp_recipes.runtime.world import World

FIRSTS = "DDP_RECIPES_FIRST_RANKS"  # of each node, where they may hold unequal numbers
MEET = timedelta(minutes=5)  # for rank 0 to load torch


def work(lifeline: int, reports: int, stacks: int, meeting: int | None = None) -> NoReturn:
    """Read a job, run it as a local rank, report how it ended, and exit.

    Args:
        lifeline: pipe that brings the job, one line, then what the launcher says; its end is the launcher's end.
        reports: pipe for what the rank says, and for the report, a line each.
        stacks: file for the Python stacks when SIGUSR2 ends it.
        meeting: file that the ranks' store is in; without one they are on several nodes.
    """
    die_with_parent()
    ignore_broken_pipe()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    rank, size, local_rank, local_size, node = (int(os.environ.get(name, 0)) for name in names)
    world = World(rank, size, local_rank, local_size, node, tuple(map(int, os.environ.get(FIRSTS, "").split())))
    set_name(f"rank {world.rank}")
    write_at_death(stacks)
    pipe = os.fdopen(lifeline, "rb")
    job = replace(Job.from_json(pipe.readline().decode()), last=True)
    with os.fdopen(reports, "w", buffering=1) as file:
        report = run(job, world, meeting, Lifeline(pipe, lambda line: print(line, file=file)))
        ignore(ASKS_TO_STOP)  # the run has ended
        sys.stdout.flush()
        sys.stderr.flush()
        print(report.to_json(), file=file)
    leave(report.exit_status)


def run(job: Job, world: World, meeting: int | None, lifeline: Lifeline | None = None) -> RankReport:
    """Run the job as one of its ranks; return how it ended.

    Args:
        meeting: file, of no name, that the ranks have in common and meet in; without one they meet at
            ``MASTER_ADDR:MASTER_PORT``, and a key proves who they are.
        lifeline: to the launcher, where that is this process's parent.
    """
    try:
        with loading():  # the first import of torch: errors in it are reported, too
            from ddp_recipes import rank
            from ddp_recipes.launchers.store import at_address, in_file

        messages = at_address(world, os.environ, MEET) if meeting is None else in_file(meeting)
        if lifeline is None:
            return RankReport.of_summary(world.rank, rank.run(job, world, messages))
        return RankReport.of_summary(world.rank, rank.run(job, world, messages, lifeline.watcher))
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is reported
        return RankReport.of_error(world.rank, error)
