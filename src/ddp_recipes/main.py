"""The command line, and the same from Python. Loads no torch by itself."""

import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_stack
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ddp_recipes.config.extras import BEFORE_CONFIG, extra
from ddp_recipes.config.targets import is_run
from ddp_recipes.controller import Controller
from ddp_recipes.errors import INTERRUPTED, RecipeError, RequestError, printable
from ddp_recipes.launchers import environment
from ddp_recipes.launchers.base import Resources
from ddp_recipes.runtime.job import ASKS_TO_STOP
from ddp_recipes.runtime.process import die_with_parent, ignore_broken_pipe, ignore_once, interrupted_by, leave

CONF = "pkg://ddp_recipes.conf"


def main(config_path: str = CONF, config_name: str = "train", *, leaves: bool = False) -> None:
    """Run the command line and exit: 0 finished, 1 failed, 2 refused, 75 stopped after a checkpoint, 130 interrupted.

    Args:
        config_path: absolute folder or ``pkg://`` path of an application's own primary config; groups that it does not
            have come from ``ddp_recipes``.
        config_name: the primary config.
        leaves: whether nothing comes after this in the process, which then exits a second sooner, without unwinding.
    """
    ignore_broken_pipe()
    status = 0
    try:
        folder = _current_folder()
        if folder not in sys.path and "" not in sys.path and not is_run(Path(folder)):
            sys.path.append(folder)  # own models in the current folder, also for the console script
        if sys.argv[1:] and sys.argv[1] in BEFORE_CONFIG:
            extra(sys.argv[1])(sys.argv[2:])
        else:
            run(sys.argv[1:], config_path=config_path, config_name=config_name, leaves=leaves)
    except RecipeError as error:
        print(printable(error), file=sys.stderr)
        status = error.exit_status
    except KeyboardInterrupt as error:
        print(f"Interrupted{': ' if error.args else ''}{error}.", file=sys.stderr)
        status = INTERRUPTED
    if leaves:
        ignore_once(ASKS_TO_STOP)  # there is nothing left to stop
        leave(status)
    sys.exit(status)


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise RequestError(
            "The current folder has been removed, or removed and made again. Go to one that is there: cd ~, or cd $PWD."
        ) from None


_going = threading.RLock()  # by the thread that has a run


def _forget() -> None:
    """Have no run in a fork: the thread that has it is not there."""
    global _going
    _going = threading.RLock()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Refuse a second thread's run: a job's config, which Hydra keeps, seeds and defaults are a process's own."""
    if not _going.acquire(blocking=False):
        raise RequestError(
            "another thread of this process has a run that is still going, and a process has one at a time. Start them "
            "one after the other, in processes of their own, or as a sweep: run(['-m', 'key=1,2'])."
        )
    try:
        yield
    finally:
        _going.release()


@_one_at_a_time()
def run(
    request: Sequence[str] | Mapping[str, Any] | DictConfig = (),
    *,
    config_path: str = CONF,
    config_name: str = "train",
    directory: str | Path | None = None,
    leaves: bool = False,
) -> Any:
    """Run what ``train.py`` would with these arguments, or a composed config; return the summary.

    That is a dictionary, and with ``-m`` a list of one for each job. Rank 0, or the only process, is the controller;
    one that was started as another rank follows it, and then exits.

    Args:
        request: overrides and flags, or a config that is composed already, which is run as it is.
        directory: of a composed config's run. Left out, it is that of the Hydra job that this is called in, or else
            ``outputs/<date>/<time>``.
        leaves: whether this process exits after it.

    Raises:
        RequestError: the request was wrong; nothing was written.
        RunFailed: training failed; the message holds the failing rank's traceback.
        Preempted: a signal stopped it after a checkpoint was saved.
    """
    _refuse_within_an_import()
    _current_folder()
    composed = _composed(request, directory)
    world = None if composed is None and _supervises(request) else environment.join(os.environ)
    if world is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the local launcher does
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # torchrun's workers outlive an agent that is killed
    if world is not None and not world.is_main:
        leave(Resources(world).channel.follow())
    if world is not None and world.world_size > 1 and Controller.ended:
        raise RequestError(
            f"This is a second run in one of {world.world_size} processes that were started together, and the others "
            f"exited with the first. Start them once for each run, or let one run do it all: -m key=1,2."
        )
    controller = Controller(world, leaves)
    status = 1
    try:
        with interrupted_by(ASKS_TO_STOP):
            if composed is not None:
                outcome: Any = controller.run_composed(composed, directory)
            else:
                outcome = controller.run([*request], config_path, config_name)
        status = 0
        return outcome
    except RecipeError as error:
        status = error.exit_status
        raise
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        raise
    except KeyboardInterrupt:
        status = INTERRUPTED
        raise
    finally:
        controller.close(status)


def _supervises(request: Collection[str]) -> bool:
    """Whether this process starts the ranks of a node, whose one task Slurm may have started.

    Raises:
        RequestError: torchrun has started it.
    """
    if "launcher=nodes" not in request:
        return False
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RequestError(
            "launcher=nodes starts the ranks of its node by itself, and this process is one that torchrun started. "
            "Start train.py once on each node without torchrun, or leave launcher=nodes out."
        )
    return True


def _composed(request: Any, directory: str | Path | None) -> DictConfig | None:
    """Return a request that is a config already; ``None`` for one of overrides and flags.

    Raises:
        RequestError: it is neither, or there are overrides and a directory.
    """
    if isinstance(request, Mapping | DictConfig):
        given: Any = request
        config: DictConfig = OmegaConf.create(given)
        return config
    are_texts = isinstance(request, Sequence) and all(isinstance(each, str) for each in request)
    if isinstance(request, str) or not are_texts:
        one = request if isinstance(request, str) else "trainer.max_epochs=3"
        raise RequestError(f"ddp_recipes.run takes a list of overrides, or a config: run([{one!r}]).")
    if directory is not None:
        raise RequestError("directory= is for a composed config. With overrides, give hydra.run.dir=… among them.")
    return None


def _refuse_within_an_import() -> None:
    """Refuse a call by a script that a run imports for what is named of it: it would be a run for each import."""
    frames = [frame for frame, _ in walk_stack(None)]
    module = next((place for place, frame in enumerate(frames) if frame.f_code.co_name == "<module>"), len(frames))
    outside = [str(frame.f_globals.get("__name__")) for frame in frames[module + 1 :]]
    if any(name.startswith("ddp_recipes.") for name in outside):
        raise RequestError(
            f"a run imports {frames[module].f_globals['__name__']}.py, which calls ddp_recipes.run as it is imported. "
            f"Put that call under if __name__ == '__main__':"
        )
