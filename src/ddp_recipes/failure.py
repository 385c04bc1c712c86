"""How a rank fails: the others are told, the error is shown with what helps, and what it left is written down."""

import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ddp_recipes._compat.messages import out_of_memory, timed_out
from ddp_recipes._compat.torch_ import recorded_collectives
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.checkpointing.writing import disk_failure
from ddp_recipes.devices import dump_memory
from ddp_recipes.errors import RecipeError, RunFailed
from ddp_recipes.output import Output
from ddp_recipes.reporting.run_directory import in_ranks, write_flight_recorder, write_trace
from ddp_recipes.runtime.advice import add_advice
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.process import disconnect
from ddp_recipes.runtime.tensors import digest

log = logging.getLogger(__name__)


def fail(recipe: Recipe, control: Control, output: Output, error: BaseException) -> NoReturn:
    """Record a failure for the other ranks and in the run directory, and raise the error to show."""
    error, text = _explained(recipe, output, error)
    me, culprit = recipe.world.rank, error.rank if isinstance(error, RunFailed) else None  # of what all ranks see alike
    rank, cause = control.fail(text, me if culprit is None else culprit)
    hung = timed_out(error) or recipe.strategy.exchanges.late
    if rank == me and hung and (unresponsive := control.unresponsive_ranks()):
        names = ", ".join(map(str, unresponsive))
        cause = text = (
            f"{text}Rank {names} of {recipe.world.world_size} did not respond within launcher.timeout_s="
            f"{control.timeout_s:g} seconds: stopped, stuck or cut off."
        )
        error = RunFailed(text, unresponsive=unresponsive)
    if (rank == me or recipe.world.is_main) and (peers := _told_of(control.unexpected_peers())):
        error.add_note(peers)
        text, cause = f"{text}{peers}\n", f"{cause}{peers}\n"
    disconnect(control.connections)  # what torch keeps of the group may outlive its end, and the others wait meanwhile
    if output.opened:
        write_trace(recipe.job.directory, me, text)
        if hung:
            write_flight_recorder(recipe.job.directory, me, recorded_collectives())
    last = cause.strip().splitlines()[-1]
    facts = output.facts(_digest(recipe)) | {"status": "failed", "error": f"rank {rank}: {last}"}
    output.finish(facts, cause)
    if rank != me:
        raise RunFailed(f"Rank {rank} failed, so rank {me} stopped: {last}", rank=rank) from error
    raise error


def refuse(recipe: Recipe, output: Output, error: RecipeError) -> None:
    """Record that a run is refused, if it has begun: some of what is wrong with a request shows in training alone."""
    if output.opened:
        last = str(error).strip().splitlines()[-1]
        output.finish(output.facts(_digest(recipe)) | {"status": "failed", "error": last}, str(error))


def _explained(recipe: Recipe, output: Output, error: BaseException) -> tuple[BaseException, str]:
    """Return the error to show, with what may help, and all that is to be shown of it."""
    if not isinstance(error, RecipeError):
        error = disk_failure(error, recipe.job.directory) or error
    own = isinstance(error, RecipeError)  # whose message is enough; anything else needs its traceback
    remedy = None if own else recipe.strategy.explain(error, recipe.task)
    if not own and remedy is None:
        add_advice(error, recipe.job.config)
    if output.opened and out_of_memory(error) and (path := _leave_memory(recipe)) is not None:
        error.add_note(f"What was allocated is in {path}: drag it onto https://pytorch.org/memory_viz.")
    text = f"{error}\n" if own else "".join(traceback.format_exception(error))
    if remedy is None:
        return error, text
    return RunFailed(f"{text}{remedy}"), f"{text}{remedy}"


def _digest(recipe: Recipe) -> str | None:
    """Return the SHA-256 of the weights, where this rank has all of them: others would have to be asked for a part."""
    if recipe.request.strategy.kind != "replicated" or not recipe.world.is_main:
        return None
    try:
        return digest(recipe.task.weights())
    except Exception:  # noqa: BLE001 - what is to be shown is what failed, which after a device-side error comes again here
        return None


def _leave_memory(recipe: Recipe) -> Path | None:
    """Write to ``ranks/`` what is allocated on this rank's devices; return the file, if there can be one."""
    path = in_ranks(recipe.job.directory, f"memory_{recipe.world.rank}.pickle")
    try:
        return path if dump_memory(recipe.device, path) else None
    except Exception:  # what is to be shown is why memory was exhausted
        log.warning("There is no snapshot of the memory.", exc_info=True)
        return None


def _told_of(unexpected: Mapping[int, Sequence[int]]) -> str:
    """Return what is to be said of other users who connected to ranks, a line for each of these."""
    return "\n".join(
        f"While the ranks met, user {', '.join(map(str, users))} of this machine connected to rank {met}, and was "
        "disconnected: if that was in a rank's place, this is why. Start again."
        for met, users in unexpected.items()
    )
