"""A rank is lost in the midst of training: the others regroup, with a new one that gets the state of one of them."""

import gc
import io
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

from torch import nn

from ddp_recipes._compat.messages import lost_a_rank
from ddp_recipes._compat.torch_ import tree_leaves
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.build.resume import fit_cursor
from ddp_recipes.build.run import cut_off, join
from ddp_recipes.callbacks import Callback
from ddp_recipes.checkpointing.files import State
from ddp_recipes.config.parallelism import ModelLayout
from ddp_recipes.errors import Left, RequestError, RunFailed, chain
from ddp_recipes.recovery.memory_server import opener
from ddp_recipes.recovery.source import moment
from ddp_recipes.recovery.state_transfer import (
    BeforeStep,
    Memory,
    Points,
    in_memory,
    load_snapshot,
    progress_of,
    resume_from,
    rewind,
    sync_to,
    transferred_state,
)
from ddp_recipes.runtime.job import ExitRequest, Loss, Regroup
from ddp_recipes.strategies.base import batch_norms
from ddp_recipes.strategies.collectives import broadcast
from ddp_recipes.training import loop
from ddp_recipes.training.hooks import RunHooks
from ddp_recipes.training.state import Run

log = logging.getLogger(__name__)


class Recovery(RunHooks):
    """Training that goes on beyond the loss of ranks, which the launcher replaces or starts again.

    Attributes:
        run: once it began.

    Args:
        note: is called on rank 0 once the step is done that a loss cut off.
    """

    run: Run

    def __init__(self, recipe: Recipe, note: Callable[[], None]) -> None:
        self.recipe, self._note = recipe, note
        self.memory: Memory | None = None
        self.before: BeforeStep | None = None  # where lost ranks are replaced
        self.losses = 0  # that the launcher knows of, and this run has counted
        self.regrouped: Regroup | None = None  # after the loss of ranks, until the step that it cut off is done

    def receive(self, regroup: Regroup) -> State:
        """Return the state with which this rank takes the place of a lost one. A collective."""
        recipe = self.recipe
        in_rows = regroup.states and recipe.strategy.settings.kind == "sharded"
        state = load_snapshot(regroup.states, _opener(recipe)) if in_rows else _of_source(recipe, regroup)
        if regroup.states:  # all ranks are new, and may be fewer or more
            recipe.warnings[:] = fit_cursor("The state in memory", state, recipe.request, recipe.loaders["train"])
        step, _ = state["run"]["points"]
        purge_step = step if step >= 0 else state["cursor"]["step"] + 1  # its points come again, from ``resume_from``
        return {**state, "checkpointer": {"values": state["run"]["values"]}, "purge_step": purge_step}

    def begin(self, run: Run) -> None:
        """Take the run, before any of it is written.

        Raises:
            RequestError: the config asks for a state in memory that nobody would read, or that is not all a rank needs.
        """
        self.run, self.memory = run, make_memory(self.recipe, run)

    def fit(self) -> str:
        """Run the loop to its end; return why it ended."""
        recipe, run = self.recipe, self.run
        run.hooks = [*run.hooks, self]
        if may_go_on(recipe, run):
            self.before, run.logger, run.together = BeforeStep(run.task), Points(run.logger), _parts(recipe) > 1
        elif recipe.world.restarts and recipe.checkpoint.in_memory_every_n_steps:
            run.logger = Points(run.logger)  # the state may be another node's, and rank 0 be lost before it wrote them
        if recipe.regroup is not None and recipe.state is not None:
            self.resume_from(recipe.state, recipe.regroup)
            if recipe.control.joins:
                recipe.control.watcher.joined()
            if self.memory is not None and recipe.regroup.states and _parts(recipe) > 1:
                self.memory.keep(run, self.losses)  # where parts lie now: another loss may come before the next is due
        if self.before is None and not recipe.job.start:  # else others go on, though not this rank
            return loop.fit(run)
        while True:
            try:
                return loop.fit(run)
            except Exception as error:
                if not (lost_a_rank(error) or run.strategy.exchanges.lost):
                    raise
                cause = error
            self.regroup(cause)

    def on_step_start(self, run: Run) -> None:
        """Keep what passes write to: what a step that is cut off leaves there does not count."""
        if self.before is not None:
            self.before.begin()

    def on_update(self, run: Run) -> None:
        """Keep it again, for what follows may be cut off as well, and tell what a loss came to."""
        if self.before is not None:
            self.before.end()
        self._tell()

    def on_validated(self, run: Run) -> None:
        """Keep the buffers: a validation gives ranks the same ones."""
        if self.before is not None:
            self.before.keep()

    def on_step_end(self, run: Run) -> None:
        """Keep the state in memory, if it is due."""
        every = run.checkpoint.in_memory_every_n_steps
        if every is not None and run.cursor.step % every == 0:
            self._keep(self.memory)

    def on_fit_end(self, run: Run) -> None:
        """Tell what a loss came to where nothing was left but to end the last step."""
        if run.reason != "moved":
            self._tell()

    def leave(self) -> None:
        """Keep the state where the ranks that start again, with other nodes, find it."""
        self._keep(memory_of(self.recipe))

    def _keep(self, memory: Memory | None) -> None:
        """Keep the state in memory of this rank, or help others to put theirs together."""
        if memory is not None:
            memory.keep(self.run, self.losses)
        elif self.run.task.gathers_state:
            transferred_state(self.run, self.losses)

    def resume_from(self, state: State, regroup: Regroup) -> None:
        """Go on from a state that this rank has now."""
        self.losses, self.regrouped = state["run"]["losses"], regroup
        resume_from(self.run, state, regroup)

    def _tell(self) -> None:
        """Tell what losses came to, once the next step is done: also those of ranks lost while others met again.

        A rank 0 that is lost in that step may have reported nothing, though the step counts.
        """
        if self.regrouped is None:
            return
        run, regroup, self.regrouped = self.run, self.regrouped, None
        unreported, now = regroup.why[regroup.reported :], moment()
        if self.losses < len(regroup.why):
            run.seconds_lost += now - regroup.since[self.losses]
        run.replaced += len(regroup.why) - self.losses
        self.losses = len(regroup.why)
        seconds = now - regroup.since[regroup.reported] if unreported else 0.0
        how = "All started again from memory" if regroup.states else "Replaced"
        lines = [
            f"{why} {how}, at the cost of {seconds:.1f} s until step {run.cursor.step} was done." for why in unreported
        ]
        if run.world.is_main:
            for line in lines:
                log.warning("%s", line)
            self.recipe.control.watcher.reported(len(regroup.why))  # now, or who takes this rank's place says it again
            self._note()
        for line in lines:
            run.logger.text("ranks replaced", line)

    def regroup(self, error: Exception) -> None:
        """Wait for the launcher's word, and go on with the others; raise the error where the run ends.

        A rank that is lost meanwhile ends this attempt, and begins the next.
        """
        recipe, run = self.recipe, self.run
        while True:
            self._leave_group(error)
            alone = _alone(recipe, run if self.before is not None else None)
            loss = Loss(*progress_of(run), text="".join(traceback.format_exception(error)), alone=alone)
            if (regroup := recipe.control.await_regroup(loss)) is None:
                raise error
            if isinstance(regroup, ExitRequest):
                if regroup.keep and not run.task.gathers_state:
                    self.leave()
                raise Left
            gc.collect()  # what holds the group refers to itself; it takes a second, in which new ranks start
            try:
                recipe.control.agree(None, recipe.facts)
                join(recipe)
                recipe.control.watcher.joined()
                state = _of_source(recipe, regroup, lambda: transferred_state(run, self.losses))
                sync_to(run, state)
                if self.before is not None:
                    self.before.keep()
                self.resume_from(state, regroup)
                run.module = run.strategy.wrap(run.task, run.devices)
                return
            except RequestError as refused:  # by a rank that is not there any more to refuse it together
                raise RunFailed(str(refused)) from None
            except (RunFailed, RuntimeError) as another:
                error = another

    def _leave_group(self, error: Exception) -> None:
        """Close the connections to the others, who may be waiting for this rank, and forget what was under way."""
        for cause in chain(error):
            traceback.clear_frames(cause.__traceback__)
        cut_off(self.recipe)
        rewind(self.run, self.before)
        self.recipe.strategy.teardown()


def may_go_on(recipe: Recipe, run: Run) -> bool:
    """Whether a rank's memory has all that a new one needs, and is whole whenever another rank is lost.

    It is not where a task steps its optimizers itself, nor where a callback keeps the model elsewhere for a while.
    """
    aside = _aside(run) if recipe.request.launcher.replace_ranks > 0 else []
    if aside and run.world.is_main:
        log.warning(
            "callbacks.%s may put other weights in the model's place for a save: where a rank is lost, all start again "
            "from the last checkpoint.",
            ", callbacks.".join(aside),
        )
    shared = 0 < _parts(recipe) < run.world.world_size and run.strategy.rejoins
    one = _parts(recipe) == 1 or recipe.trainer.precision != "16-mixed"  # whose scaler has a group of its own
    return recipe.request.launcher.replace_ranks > 0 and shared and one and run.task.update is None and not aside


def _aside(run: Run) -> list[str]:
    """Return the callbacks that may put other weights in the model's place for a save, or get their state ready then.

    One that has neither a state nor any tensors but the task's own does neither.
    """
    modules = set(run.task.modules())

    def harmless(each: Callback) -> bool:
        held = [value for name, value in vars(each).items() if name != "run"]
        plain = (bool, int, float, str, Path, type(None))
        known = (
            leaf in modules if isinstance(leaf, nn.Module) else isinstance(leaf, plain) for leaf in tree_leaves(held)
        )
        return type(each).state is Callback.state and all(known)

    prepare = [name for name, each in run.callbacks.items() if type(each).on_save_start is not Callback.on_save_start]
    return [name for name in prepare if not harmless(run.callbacks[name])]


def make_memory(recipe: Recipe, run: Run) -> Memory | None:
    """Return where this rank keeps its state besides checkpoints, if the config asks for that and this rank does.

    Raises:
        RequestError: nobody would read it, or it is not all that a new rank needs.
    """
    every, launcher = recipe.checkpoint.in_memory_every_n_steps, recipe.request.launcher
    if every is None:
        return None
    asked = f"checkpoint.in_memory_every_n_steps={every}"
    if not launcher.max_restarts + launcher.replace_ranks + recipe.world.restarts:
        raise RequestError(
            f"{asked} keeps a state for ranks that are started again, and none would be: set launcher.max_restarts or "
            f"launcher.replace_ranks; where torchrun starts them, only torchrun --max-restarts."
        )
    if not _parts(recipe):
        raise RequestError(f"{asked}: with strategy={recipe.request.strategy.name} a rank's state is not all it needs.")
    if aside := _aside(run):
        raise RequestError(f"{asked} does not go with callbacks.{aside[0]}, which puts other weights aside for a save.")
    if recipe.world.restarts and recipe.world.nnodes > 1 and _parts(recipe) > 1:
        raise RequestError(
            f"{asked}: torchrun may start ranks on other nodes than those that have their parts of the model in "
            f"memory. On several nodes choose a strategy of whole models, such as ddp, or leave the key out."
        )
    if recipe.world.restarts and not recipe.job.memory:
        recipe.warnings.append(
            f"{asked}: no state is kept in memory. torchrun keeps no logs (--log-dir), beside which its next start "
            f"would find where it is."
        )
    return memory_of(recipe) if recipe.world.local_rank < _parts(recipe) else None  # others here have the same


def memory_of(recipe: Recipe) -> Memory | None:
    """Return where this rank can leave its state, if there is a place and it is of use to another one."""
    slots, parts, alone = recipe.job.memory, _parts(recipe), _alone(recipe)
    useful = parts and (not alone or recipe.world.rank in alone)
    return Memory(slots, parts, recipe.job.start) if slots and useful else None


def _layout(recipe: Recipe) -> ModelLayout:
    return recipe.request.strategy.layout(recipe.world.world_size)


def _parts(recipe: Recipe) -> int:
    return _layout(recipe).parts


def _of_source(recipe: Recipe, regroup: Regroup, own: Callable[[], State] | None = None) -> State:
    """Return the state of the rank that hands over the same part of the model as this one's. A collective.

    Args:
        own: what this rank hands over, should it be the one; ``None``: what was left in memory.
    """
    parts, rank = len(regroup.sources), recipe.world.rank
    source = regroup.sources[rank % parts]
    mine = None
    if rank == source:
        mine = own() if own is not None else in_memory(regroup.states[rank % parts], _opener(recipe))
    if mine is not None and parts == recipe.world.world_size:  # nobody else has it
        return mine
    state: State = broadcast(mine, source // parts, recipe.strategy.peers)
    recipe.strategy.exchanges.synchronize()
    return state


def _opener(recipe: Recipe) -> Callable[[str], io.RawIOBase]:
    messages = recipe.control.messages
    return opener(b"" if messages is None else messages.key)


def _alone(recipe: Recipe, run: Run | None = None) -> tuple[int, ...]:
    """Return the ranks that have what no other rank has.

    These are the first replica's where buffers that are saved are its own: of whole models batch norms'. Where a
    callback of this rank has got tensors since training began, all others: then nobody goes on from it.

    Args:
        run: where its ranks may be replaced.
    """
    if run is not None and _aside(run):
        return tuple(rank for rank in range(recipe.world.world_size) if rank != recipe.world.rank)
    layout, task = _layout(recipe), recipe.task
    own = (
        batch_norms(task)
        if layout.kind == "replicated"
        else dict(task.named_buffers()).keys() & task.state_dict().keys()
    )
    return () if layout.same_buffers or not own else (*range(layout.parts),)
