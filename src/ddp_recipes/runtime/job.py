"""One run as it travels from the process that composed it to every rank, with what it names of ``__main__``."""

import json
import re
import signal
import sys
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_recipes.errors import RequestError

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

    def __reduce__(self) -> tuple[Any, ...]:
        return Job.from_json, (self.to_json(),)

    def resumed(self, main: bool = True) -> "Job":
        """Return the job as it goes on in its directory: from the last checkpoint there or, without one, as requested.

        Args:
            main: whether this is the one process that may clear the directory for a run that begins there again.
        """
        if self.saved_step >= 0:
            return replace(self, config={**self.config, "ckpt_path": "auto"})
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
        return json.dumps({**vars(self), "directory": str(self.directory), "main": main})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Return the job that :meth:`to_json` wrote."""
        values = json.loads(text)
        if "meeting" in values:  # of an earlier version, which has submitted it
            values["regroup"] = values.pop("meeting")
        return cls(**{**values, "directory": Path(values["directory"])})


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
