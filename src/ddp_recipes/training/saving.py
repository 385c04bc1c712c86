"""A checkpoint of the whole run: all ranks gather it, one or several write it, and none times out meanwhile."""

from collections.abc import Mapping

import torch

from ddp_recipes.config.monitor import check_measured
from ddp_recipes.training.non_finite import non_finite_weights
from ddp_recipes.training.state import Run, gather_state

HEARTBEAT_S = 0.25  # less than the least launcher.timeout_s


def save(run: Run, measured: bool) -> None:
    """Save a checkpoint; ``measured`` says that the monitored metric belongs to this very step.

    Non-finite weights end the run instead, so the newest checkpoint is always a good one.
    """
    run.logger.flush()  # or a kill would take points with it that do not come again
    if measured and run.task.names_metrics and not run.monitor.startswith("train/"):
        check_measured(run.monitor, run.metrics)
    fresh = measured or not run.val or run.monitor.startswith("train/")
    value = run.metrics.get(run.monitor) if fresh else None
    if value is not None:
        run.values[str(run.cursor.step)] = value
    bad = non_finite_weights(run.task)  # those that are trained, whatever callbacks put in their place
    for callback in run.callbacks.values():
        callback.on_save_start(run.cursor.step)
    await_writer(run, bad)
    state = gather_state(run)
    run.strategy.exchanges.settle()
    run.checkpointer.save(state, run.cursor.step, value)
    if not run.checkpoint.async_save:
        await_writer(run, bad)
    run.saved_step = run.cursor.step
    if run.checkpoint.enabled and not run.trainer.fast_dev_run:
        run.good_step = run.saved_step
    for callback in run.callbacks.values():
        callback.on_save(run.cursor.step)


def await_writer(run: Run, bad: Mapping[str, bool]) -> None:
    """Wait on all ranks until all have written, however long it takes: they join a collective now and then meanwhile.

    So none times out because of a slow disk, and one does if another is dead or stopped. All learn at the same time
    whether some rank has non-finite weights.
    """
    writing = 1
    while writing:
        mine = [[int(run.checkpointer.busy(HEARTBEAT_S)), sum(bad.values())]]
        busy = mine[0][0]
        writing, bad_anywhere = run.strategy.sum(torch.tensor(mine, device=run.devices[0])).tolist()
        if writing == busy == 1:
            run.checkpointer.others_are_done()
        if bad_anywhere:
            run.guard.fail_for_weights(run.cursor.step, bad, run.good_step)
