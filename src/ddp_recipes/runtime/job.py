"""What goes between whoever started ranks and each of them: the job, and what is said where ranks regroup after a loss.

Loads no torch.
"""

import json
import re
import signal
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_recipes.errors import RequestError

if TYPE_CHECKING:
    from ddp_recipes.runtime.messages import Messages


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # after a checkpoint; whoever gets one
ASKS_TO_STOP = tuple(  # in this process: nohup has SIGHUP ignored, from the start
    number for number in STOPPING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
)


@dataclass(frozen=True)
class Job:
    """What to run and where its results go.

    Attributes:
        config: resolved, plain data; what comes from the environment is still an interpolation.
        directory: the run directory, absolute.
        hydra: Hydra's own record, file name to text, for ``.hydra/``.
        overrides: of the command line, or of the sweep.
        last: whether the processes that run it exit with it: then they ignore the signals that request that, once each.
        main: what the config names of the ``__main__`` that it comes from, where that is another process's.
        base: the directory that was made for it, or for the sweep that it is of.
        regroup: where a rank that takes the place of a lost one joins the others, as JSON.
        memory: files in which a rank keeps its state, in turn.
        start: name of this start of the ranks, where there are several.
        goes_on: whether it is a run that was started before, so that what its callbacks had decided holds.
        chosen: what the program that requests it has chosen of torch, for all of what it does.
    """

    config: Mapping[str, Any]
    directory: Path
    hydra: Mapping[str, str] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    last: bool = False
    main: str = ""
    base: str = ""
    regroup: Mapping[str, Any] | None = None
    memory: Sequence[str] = ()
    start: str = ""
    goes_on: bool = False
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return Job.from_json, (self.to_json(),)

    def resumed(self, main: bool = True) -> "Job":
        """Return the job as it goes on in its directory: from the last checkpoint there or, without one, as requested.

        Args:
            main: whether this is the one process that may clear the directory for a run that begins there again.
        """
        if self.saved_step >= 0:
            return replace(self, config={**self.config, "ckpt_path": "auto"}, goes_on=True)
        if main:
            (self.directory / "config.yaml").unlink(missing_ok=True)  # what marks a directory as used
        return self

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint in its directory; -1 without one."""
        names = (path.stem.removeprefix("step_") for path in (self.directory / "checkpoints").glob("step_*.*"))
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def to_json(self, with_main: bool = True) -> str:
        """Return the job as one line of text, for another process; ``with_main`` unless that runs the same program."""
        main = (self.main or pack(self.config)) if with_main else ""
        config = _keyed(self.config)
        return json.dumps({**vars(self), "config": config, "directory": str(self.directory), "main": main})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Return the job that :meth:`to_json` wrote."""
        values = json.loads(text, object_hook=_unkeyed)
        return cls(**{**values, "directory": Path(values["directory"])})


_PAIRS = "__pairs__"


def _keyed(value: Any) -> Any:
    """Return data of a config with mappings whose keys are numbers as lists of pairs: JSON makes texts of such keys."""
    if isinstance(value, Mapping):
        plain = {name: _keyed(each) for name, each in value.items()}
        return plain if all(isinstance(name, str) for name in plain) else {_PAIRS: [*plain.items()]}
    return [_keyed(each) for each in value] if isinstance(value, (list, tuple)) else value


def _unkeyed(mapping: dict[str, Any]) -> dict[Any, Any]:
    return dict(mapping[_PAIRS]) if [*mapping] == [_PAIRS] else mapping


def pack(config: Mapping[str, Any]) -> str:
    """Return what a config names of ``__main__``, as text that :func:`unpack` takes; empty if it names nothing.

    Raises:
        RequestError: it cannot be sent to other processes.
    """
    main, names = sys.modules["__main__"], sorted(set(re.findall(r"'__main__\.(\w+)", repr(config))))
    objects = {name: getattr(main, name) for name in names if hasattr(main, name)}
    if not objects:
        return ""
    import cloudpickle

    try:
        return b64encode(cloudpickle.dumps(objects)).decode()
    except Exception as error:  # whatever a class of a user's refers to may raise
        raise RequestError(
            f"{', '.join(f'__main__.{name}' for name in objects)} cannot be sent to the other processes ({error}). Put "
            f"it into a file: %%writefile my_model.py as the first line of a notebook's cell writes one, and "
            f"my_model.{names[0]} is then its name. Or use launcher.nproc_per_node=1."
        ) from error


def unpack(text: str) -> None:
    """Put into this process's ``__main__`` what it does not have."""
    if text:
        import cloudpickle

        main = sys.modules["__main__"]
        for name, value in cloudpickle.loads(b64decode(text)).items():
            if not hasattr(main, name):
                setattr(main, name, value)


@dataclass(frozen=True)
class Loss:
    """A rank's message that it can no longer reach another one.

    Attributes:
        text: the error by which it noticed.
        alone: ranks that have what no other rank has, and so can neither be replaced nor be behind.
    """

    step: int
    after: int
    text: str
    alone: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return it as one line of text."""
        return json.dumps({"loss": asdict(self)})


@dataclass(frozen=True)
class ExitRequest:
    """The message that ranks do not regroup: all exit, and others go on.

    Attributes:
        keep: whether this rank leaves its state in memory.
    """

    keep: bool


@dataclass(frozen=True)
class Regroup:
    """The address where ranks form a new group, and the ranks whose state they go on with.

    Attributes:
        file: of the store, as a path that any process of this user can open.
        sources: of each part of the model the rank whose state all go on with that hold it.
        lost: ranks that are replaced.
        why: how each rank was lost that is replaced in this run, a line each: these, and those before them.
        since: the :func:`moment` at which each loss was noticed.
        reported: how many of these losses are reported to the user.
        states: of each part of the model where its state is in memory, on this node or another, if all ranks are new.
    """

    file: str
    sources: tuple[int, ...]
    lost: tuple[int, ...]
    why: tuple[str, ...]
    since: tuple[float, ...]
    reported: int = 0
    states: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Regroup":
        """Return the one whose fields came as JSON."""
        made: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
        return cls(**made)


@dataclass(frozen=True)
class Watcher:
    """By default, nobody watches.

    Attributes:
        exited: returns the ranks whose process is known to have exited, which need not be waited for.
        joined: called once this rank has joined the others, and has the state that they have.
        reported: called with how many losses are reported to the user.
        request: reports a loss, and waits; returns where ranks regroup, that all exit, or that the run ends: ``None``.
        when_lost: takes what another thread calls once a rank is lost.
        moves: returns whether all are to leave after a step, for others to go on.
    """

    exited: Callable[[], Iterable[int]] = tuple
    joined: Callable[[], None] = lambda: None
    reported: Callable[[int], None] = lambda number: None
    request: Callable[[Loss], "tuple[Regroup, Messages] | ExitRequest | None"] = lambda loss: None
    when_lost: Callable[[Callable[[], None]], None] = lambda call: None
    moves: Callable[[], bool] = lambda: False
