"""One run on one rank: get ready, agree with the others, work, write a summary."""

import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

import torch

from ddp_recipes.build.instantiate import reaches_own_code
from ddp_recipes.build.recipe import Recipe, make_recipe
from ddp_recipes.build.run import join, make_run, make_stop_controller
from ddp_recipes.checkpointing.files import refuse_folders
from ddp_recipes.config.extras import extra
from ddp_recipes.config.settings import check_measured
from ddp_recipes.data.loader import skipped_of
from ddp_recipes.devices import choose_as, identity, is_accelerator, leaves_tensor_cores_idle
from ddp_recipes.errors import MAKE_KEY, Left, Preempted, RecipeError, RequestError, RunFailed
from ddp_recipes.failure import add_advice, fail, refuse  # not once it is needed, when a file may be one too many
from ddp_recipes.output import Output
from ddp_recipes.reporting.logs import own_lines
from ddp_recipes.reporting.run_directory import RunDirectory, Summary
from ddp_recipes.runtime.control import FELL_BACK, NOBODY, OWN, Control
from ddp_recipes.runtime.job import ASKS_TO_STOP, Job, Watcher, unpack
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.process import ignore_once, shorten_names_of_sockets
from ddp_recipes.runtime.tensors import digest, plain, without_digest
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import refuse_differing
from ddp_recipes.training import loop
from ddp_recipes.training.cadence import save_meets_validation
from ddp_recipes.training.guards import refusing_collectives
from ddp_recipes.training.metrics import Matrices, evaluate, log_matrices, settle_monitor
from ddp_recipes.training.precision import make_precision
from ddp_recipes.training.state import Run

log = logging.getLogger(__name__)

NO_KEY = (
    f"others who reach MASTER_ADDR can write messages to this run as if they were its ranks: there is no key. "
    f"{MAKE_KEY}"
)


def run(job: Job, world: World, messages: Messages | None, watcher: Watcher = NOBODY) -> Summary:
    """Run a job as one of its ranks; return the summary, which rank 0 also writes to ``summary.json``.

    Args:
        messages: of the ranks of this very run; ``None`` with one process.
        watcher: whoever started this rank.

    Raises:
        RequestError: the job cannot be run; the same on every rank, and nothing was written.
        Preempted: a signal stopped it after a checkpoint was saved.
        Left: the launcher has others go on.
        RunFailed: it failed on another rank, which is named.
        Exception: it failed on this rank.
    """
    if "RANK" in os.environ:  # LitData's sets ask for this name beside WORLD_SIZE, and take each rank for the first
        os.environ["GLOBAL_RANK"] = str(world.rank)
    shorten_names_of_sockets()
    with own_lines(world):
        return _run(job, world, messages, watcher)


def _run(job: Job, world: World, messages: Messages | None, watcher: Watcher) -> Summary:
    around = sys.exception()
    choose_as(job.chosen)
    control = Control(world, messages, float(job.config["launcher"]["timeout_s"]), watcher)
    control.joins = job.regroup is not None and not job.regroup["states"]
    recipe, directory = prepare(job, world, control)
    output = Output(recipe, directory)
    try:
        if recipe.devices.layout is None:
            join(recipe)
            if not control.joins:  # else once it trains: until then another one's loss ends this rank, too
                watcher.joined()
        work = recipe.request.run.work
        do(work, recipe, control, output)
        summary = output.facts(final_digest(recipe)) | {"status": "finished"}
        if job.last:
            ignore_once(ASKS_TO_STOP)  # there is nothing left to stop, and a rank that died of it would not report
        copies = recipe.strategy.copies(recipe.task) if work == "fit" else {}  # else nothing is trained, or saved
        leave(recipe, control)
        if not world.is_main:  # all that could still hang comes before its end, and rank 0's summary after all ends
            close(recipe, output, around)
        others = [rank for rank in range(world.world_size) if not recipe.request.strategy.outlives(rank)]
        note = [summary["peak_memory_bytes"], copies, skipped_of(recipe.loaders.values())]
        notes = [json.loads(each) for each in control.end(others, json.dumps(note))]
        if notes:
            refuse_differing([copies for _, copies, _ in notes])
        summary["peak_memory_bytes"] = max((peak for peak, _, _ in notes if peak), default=None)
        if skipped := {number for *_, numbers in notes for number in numbers}:
            summary["skipped_samples"] = len(skipped)
        output.finish(summary)
        return summary
    except Left:
        recipe.strategy.exchanges.end()
        raise
    except RequestError as error:
        control.refuse_together(f"{error}\n")
        recipe.strategy.exchanges.end()
        refuse(recipe, output, error)
        raise
    except Preempted:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is reported, and raised again
        recipe.strategy.exchanges.end()  # or this rank would wait for the others to leave the group
        fail(recipe, control, output, _as_error(error))
    finally:
        with suppress(RecipeError):  # of a save that had begun when something else failed
            output.wait_for_save()
        if job.last:
            ignore_once(ASKS_TO_STOP)
        close(recipe, output, around)


def do(work: str, recipe: Recipe, control: Control, output: Output) -> None:
    """Do what a run is for; leave what is known of one that is told to stop.

    Raises:
        Preempted: it is.
    """
    try:
        (WORK.get(work) or extra(work))(recipe, output)
    except Preempted as error:
        facts = output.facts(final_digest(recipe))
        leave(recipe, control)
        output.finish(facts | {"status": "preempted", "error": str(error)})
        raise


def _as_error(error: BaseException) -> Any:
    """Return an error, which a call of ``sys.exit`` in a user's code is as well: a run has other ranks, and an end."""
    if not isinstance(error, SystemExit):
        return error
    failure = RuntimeError(f"sys.exit({error.code!r}) was called in the run: raise an exception there instead.")
    failure.__cause__ = error
    return failure


def final_digest(recipe: Recipe) -> str | None:
    """Return the SHA-256 of the weights on rank 0, if they have one: training does not fail at its end for that."""
    if (found := without_digest(recipe.task.weights())) is not None:
        log.warning("There is no weights_sha256: the model's state dict has got %s.", found)
        return None
    return recipe.strategy.digest(recipe.task)


def leave(recipe: Recipe, control: Control) -> None:
    """Leave the group, with all other ranks, unless some may have died. Each says first that it will.

    To leave it is a collective of NCCL's; with gloo's, who leaves early is lost to those that still exchange something.

    Raises:
        RunFailed: one did not come so far.
    """
    if recipe.request.strategy.needs_all(recipe.world.world_size):
        control.leave_together()
    recipe.strategy.teardown()


def close(recipe: Recipe, output: Output, around: BaseException | None) -> None:
    """Leave the group and close what is open; again, it does nothing.

    Args:
        around: what was being handled as the run began, which is not its own: a caller may try again in an ``except``.
    """
    failing = sys.exception() is not around
    try:
        recipe.strategy.teardown()
    except RuntimeError:  # a device that has failed does so with every call: what is to be shown is the first error
        if not failing:
            raise
        log.debug("The process group was not left.", exc_info=True)
    for loader in recipe.loaders.values():
        loader.close()
    output.close()  # last: a signal from here on may end this process before it has reported


def prepare(job: Job, world: World, control: Control) -> tuple[Recipe, RunDirectory | None]:
    """Make this rank's objects, and return them only if every rank could make its own, the same ones."""
    try:
        unpack(job.main)
        unproven = control.messages is not None and not control.messages.proven
        if unproven and job.config["launcher"].get("require_key"):
            raise RequestError(f"launcher.require_key=true, but {NO_KEY}")
        recipe = make_recipe(job, world, control)
        if (found := without_digest(initial := recipe.initial_weights())) is not None:
            raise RequestError(
                f"The state dict of {type(recipe.task.model).__name__} has {found}: no checkpoint could hold it. Have "
                f"get_extra_state() return tensors (torch.from_numpy for an array), numbers, text, lists or dicts."
            )
        if unproven:
            recipe.warnings.append(f"{NO_KEY[0].upper()}{NO_KEY[1:]}")
        directory = RunDirectory(job.directory, recipe.resumes_in_place) if world.is_main else None
        if world.is_main and recipe.mode == "fit" and recipe.request.checkpoint.enabled:
            refuse_folders(job.directory / "checkpoints")
    except (Exception, SystemExit) as raised:
        error = _as_error(raised)
        if isinstance(raised, OSError) and raised.filename is not None and not reaches_own_code(raised):
            error = RequestError(f"{os.fsdecode(raised.filename)} cannot be used: {raised.strerror}.")
        add_advice(error, job.config)
        control.agree(error, {})
        if error is not raised:
            raise error from raised
        raise
    state = recipe.state
    facts = recipe.facts
    if recipe.regroup is None:
        facts |= {
            "checkpoint": "none" if state is None else f"step {state['cursor']['step']}, checksum {state['checksum']}",
            "version of torch": torch.__version__,
            OWN: identity(recipe.device),
            FELL_BACK: recipe.built.made_whole,  # what its constructor raised is not shown else
            "digest of the initial weights": digest(initial)[:12] if world.world_size > 1 else "",
        }
    control.agree(None, facts)
    return recipe, directory


def fit(recipe: Recipe, output: Output) -> None:
    """Train, from the start or from a checkpoint."""
    recovery = extra("recovery")(recipe, output.note) if recovers(recipe) else None
    if recovery is not None and recipe.regroup is not None:
        recipe.state = recovery.receive(recipe.regroup)
    # Held to the very end: the second of two signals, the launcher's or one to every process, must not cut it short.
    run = make_run(recipe, output.hold(make_stop_controller(recipe)))
    if recipe.regroup is None:
        check_validation(run, recipe)
        check_schedules(run, recipe)
        check_saves(run)
        recipe.warnings.extend(foreseen(run, recipe))
    for callback in run.callbacks.values():
        callback.check()
    if recovery is not None:
        recovery.begin(run)
    run.guard.begin(recipe.task)
    output.open(run)
    for callback in run.callbacks.values():
        callback.on_start(recipe.job.directory if recipe.world.is_main else None, recipe.task)
    try:
        reason = recovery.fit() if recovery else loop.fit(run)
    finally:
        for callback in run.callbacks.values():
            callback.on_end()
    if reason == "moved":
        if recovery:
            recovery.leave()
        raise Left
    if reason == "signal":
        stop_early(run)
    if run.cursor.samples_seen == run.samples_before:
        why = f"callbacks.{run.stops[0]} has ended the run" if run.stops else "a limit of trainer.* is reached"
        log.info("Nothing was left to do: at step %d %s already.", run.cursor.step, why)


def recovers(recipe: Recipe) -> bool:
    """Whether ranks are to go on beyond the loss of others; else a loss ends them all."""
    job, launcher = recipe.job, recipe.request.launcher
    kept = launcher.replace_ranks or recipe.checkpoint.in_memory_every_n_steps
    return bool(kept or job.regroup is not None or job.memory or job.start)


def check_validation(run: Run, recipe: Recipe) -> None:
    """Run a few validation batches before anything is written: an error there is raised now, not after an epoch.

    A run that goes on has done so before; buffers that a module moves in a validation stay as they were saved.
    """
    steps = run.trainer.num_sanity_val_steps
    if not run.val:
        return check_followed(run, ("train/loss",))
    if steps == 0:
        return
    loaders = run.val if steps < 0 else {name: loader.limited(steps) for name, loader in run.val.items()}
    kept: AbstractContextManager[None] = nullcontext()
    if run.cursor.step:
        from ddp_recipes.tasks.blocks import on_copies

        kept = on_copies(run.task)
    with kept:
        metrics = evaluate(run.task, loaders, run.strategy, run.precision, within=refusing_collectives(run))
    run.strategy.moved = frozenset()  # a trial has no effect to tell of
    if warning := settle_monitor(run, metrics):
        recipe.warnings.append(warning)
    check_followed(run, metrics)
    for callback in run.callbacks.values():
        callback.check_metrics(metrics)
    run.task.leave_evaluation()


def check_followed(run: Run, metrics: Collection[str]) -> None:
    """Refuse a schedule that follows a metric of validations which is not among these."""
    for schedule in () if run.task.names_metrics else run.schedules:
        if schedule.monitor is not None and schedule.monitor.startswith("val"):
            check_measured(schedule.monitor, metrics, "scheduler.monitor")


def check_schedules(run: Run, recipe: Recipe) -> None:
    """Refuse a schedule of the config's that ends before the run: torch's ``OneCycleLR`` fails in a step beyond."""
    (schedule, *_), at = run.schedules, run.cursor
    by_steps, scheduler = schedule.interval == "step", schedule.scheduler
    end, done = (recipe.length.total_steps, at.step) if by_steps else (recipe.length.total_epochs, at.epoch)
    if run.task.names_metrics or end is None or not isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR):
        return
    if (ticks := scheduler.last_epoch + end - done) > scheduler.total_steps:
        where, remedy = "", f"Set scheduler.total_steps={ticks}, or null for the run's length."
        if at.step:
            where = " in the checkpoint"
            remedy = "Keep the run as long as it was, or start afresh with its weights: weights_from, no ckpt_path."
        raise RequestError(
            f"scheduler.total_steps is {scheduler.total_steps}{where}, and the run comes to {ticks} "
            f"{'steps' if by_steps else 'epochs'}: OneCycleLR takes none beyond. {remedy}"
        )


def check_saves(run: Run) -> None:
    """Refuse before anything is trained what no checkpoint could hold of a callback, as far as that is there by now."""
    if not run.checkpoint.enabled or run.cursor.step:  # what is resumed has been saved
        return
    for name, callback in run.callbacks.items():
        state = None
        with suppress(Exception):  # some of it may be there once the run has begun
            state = callback.state()
        try:
            plain(state, f"callbacks.{name}.state()")
        except TypeError as error:
            raise RequestError(str(error)) from None


def foreseen(run: Run, recipe: Recipe) -> Iterator[str]:
    """Yield what a user may not expect of this run, though nothing is wrong with it."""
    plan, settings = run.train.plan, run.checkpoint
    if plan.global_batch_size > plan.num_samples:
        yield (
            f"A global batch of {plan.global_batch_size} samples is more than data.train has: each step takes all "
            f"{plan.num_samples}. Set data.global_batch_size or data.batch_size, which is for each replica."
        )
    yield from of_device(run, recipe)
    of_training = run.monitor.startswith("train/") or (run.task.names_metrics and not run.monitor.startswith("val"))
    measured = settings.enabled and settings.save_top_k and run.val and not of_training
    if measured and not run.trainer.fast_dev_run and not save_meets_validation(run, recipe.length):
        yield (
            f"There will be no best checkpoint: none is due at a step that is validated, so of none {run.monitor} is "
            f"known. Leave out checkpoint.every_n_steps and checkpoint.every_n_epochs for one with each validation, or "
            f"set trainer.val_check_interval and trainer.check_val_every_n_epoch to fit."
        )


def of_device(run: Run, recipe: Recipe) -> Iterator[str]:
    """Yield what an accelerator does otherwise than a user may expect, with the key to set."""
    trainer, strategy, device = run.trainer, recipe.request.strategy, run.devices[0]
    if strategy.fixed_shards is not None and is_accelerator(device) and not trainer.deterministic:
        yield (
            f"strategy={strategy.name} leaves the same bits at any number of processes, but on an accelerator with "
            f"deterministic kernels alone. Set trainer.deterministic=true for them."
        )
    products = trainer.precision == "32-true" and any(each.dtype == torch.float32 for each in run.task.parameters())
    if products and trainer.matmul_precision is None and leaves_tensor_cores_idle(device):
        yield (
            "Products of float32 are computed in full precision, as torch has it. Tensor cores take a fraction of the "
            "time: set trainer.matmul_precision=high for TF32, trainer.precision=bf16-mixed, or "
            "trainer.matmul_precision=highest to keep this as it is."
        )


def stop_early(run: Run) -> NoReturn:
    """End a run that a signal stopped."""
    stopped = f"Stopped by {run.stop_controller.cause} at step {run.cursor.step}"
    if not run.checkpoint.enabled or run.trainer.fast_dev_run:
        raise RunFailed(f"{stopped}; checkpoints are off, so nothing was saved.")
    saved = "after a checkpoint was saved" if run.cursor.step > 0 else "before there was anything to save"
    raise Preempted(
        f"{stopped}, {saved}. To resume, start again with the same hydra.run.dir and ckpt_path=auto.",
        checkpoint=str(run.checkpointer.last),
    )


def measure(recipe: Recipe, output: Output) -> None:
    """Evaluate without training: ``mode=validate`` and ``mode=test``."""
    recipe.task.position.step = step = recipe.load_weights(recipe.strategy)
    recipe.forget_state()
    output.open(None)
    precision = make_precision(recipe.trainer.precision, recipe.device.type)
    matrices: Matrices = {}
    output.metrics = evaluate(recipe.task, recipe.loaders, recipe.strategy, precision, matrices)
    output.logger.scalars(output.metrics, step)
    log_matrices(matrices, output.logger, recipe.world.is_main)


def export(recipe: Recipe, output: Output) -> None:
    """Write the checkpoint's weights alone to ``model.safetensors``."""
    from ddp_recipes.checkpointing.export import write_weights

    recipe.load_weights(recipe.strategy if recipe.built.initial else None)  # else all ranks would hold the whole model
    output.open(None)
    weights = recipe.strategy.weights(recipe.task) if recipe.state is None else recipe.state["model"]
    if recipe.world.is_main:
        output.written.append(path := recipe.job.directory / "model.safetensors")
        write_weights(path, weights)


WORK: dict[str, Callable[[Recipe, Output], None]] = {
    "fit": fit,
    "validate": measure,
    "test": measure,
    "export": export,
}
