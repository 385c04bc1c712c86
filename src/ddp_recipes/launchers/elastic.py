"""What a torchrun that starts its workers again needs: where the run goes on, and from what. Loads no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ddp_recipes.errors import RequestError
from ddp_recipes.recovery.keeper import Keeper
from ddp_recipes.recovery.memory import Places
from ddp_recipes.recovery.source import Candidate, furthest
from ddp_recipes.reporting.run_directory import write_text
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.meeting import Meeting

WHY = "torchrun started all ranks again."  # it says itself which rank it lost


@dataclass(frozen=True)
class Found:
    """What a node has of earlier starts.

    Attributes:
        base: the directory that was made for the run, or for the sweep that it is of; empty if none was.
        directory: of the run whose states are in memory.
        states: of each part of the model the steps, and where the state is.
        step: of the newest that was there before the last start.
        since: when each loss before was noticed, in seconds since the epoch.
        lost_at: when this one was.
    """

    base: str = ""
    directory: str = ""
    states: Sequence[Sequence[tuple[int, str]]] = ()
    step: int = -1
    since: Sequence[float] = ()
    lost_at: float = 0.0


class RestartNote:
    """What a start leaves to the next one, in the folder that this node's torchrun made for its own logs.

    Each start of the workers composes anew, and would choose another directory: the time is in its name. Torchrun
    starts them again after a failure, after a signal to one of them, and when a node joins or is lost. The folder is
    this torchrun's alone, and lasts as long as it does: no other run finds the note there.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.on = "TORCHELASTIC_RUN_ID" in environ
        self._restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        # <folder>/attempt_<restarts>/<local rank>/error.json; any other place may not be this run's alone
        attempt = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
        kept = self.on and attempt.name == f"attempt_{self._restarts}"
        self.folder = attempt.parent if kept else None

    def read(self) -> str:
        """Return the directory of an earlier start; empty if none began."""
        return self._text("run_directory")

    def _text(self, name: str) -> str:
        path = None if self.folder is None else self.folder / name
        return path.read_text(encoding="utf-8") if path is not None and path.exists() else ""

    def write(self, directory: str) -> None:
        """Note the directory of this start, which has begun."""
        if self.folder is not None:
            write_text(self.folder / "run_directory", directory)

    def _kept(self) -> tuple[Keeper, Found] | None:
        """Return what keeps states in memory, if it is still there, and of which run."""
        if not (text := self._text("memory")):
            return None
        values = json.loads(text)
        keeper = Keeper.of(values.pop("keeper"))
        return (keeper, Found(**values)) if keeper.lives else None

    def found(self) -> Found:
        """Return all that earlier starts left."""
        base, kept = self.read(), self._kept()
        if kept is None:
            return Found(base)
        keeper, found = kept
        states = [[(kept.step, path) for kept, path in Places((pair,)).each()] for pair in keeper.paths]
        return replace(found, base=base, states=states, lost_at=keeper.lost_at)

    def keep(self, job: Job, parts: int) -> Keeper:
        """Return what keeps the run's states in memory, as many parts: what does so already, or a new one."""
        assert self.folder is not None, "there is no folder for the note"
        kept = self._kept()
        if kept is not None and kept[1].directory == str(job.directory) and len(kept[0].paths) == parts:
            keeper = kept[0]
        else:
            self.forget()
            keeper = Keeper.started(parts)
        step = max((kept.step for kept, _ in Places(keeper.paths).each()), default=-1)
        since = [] if job.meeting is None else job.meeting["since"]
        note = {"keeper": asdict(keeper), "directory": str(job.directory), "step": step, "since": since}
        write_text(self.folder / "memory", json.dumps(note), durable=False)
        return keeper

    def forget(self) -> None:
        """Keep nothing in memory any more."""
        if (kept := self._kept()) is not None:
            kept[0].end()

    def refuse_lost(self) -> None:
        """Refuse to begin anew where torchrun starts the run again and keeps no folder.

        Raises:
            RequestError: says how to go on with the run.
        """
        if self._restarts and self.folder is None:
            raise RequestError(
                f"torchrun starts this run again (restart {self._restarts}), and where it began is not known: torchrun "
                f"keeps no logs (--log-dir), beside which that is noted. Give the run a directory of its own: "
                f"hydra.run.dir=outputs/mine ckpt_path=auto, with which every start goes on there."
            )


def gone_on(job: Job, parts: int, found: Sequence[Found]) -> Job:
    """Return the job as all ranks go on with it: from the newest state in memory, unless a checkpoint is as new.

    Args:
        parts: of the model; rank r has part r modulo that.
        found: by rank, what its node has.
    """
    newest = furthest(
        Candidate(step, rank % parts, parts, (rank, path))
        for rank, each in enumerate(found)
        if each.directory == str(job.directory) and len(each.states) == parts
        for step, path in each.states[rank % parts]
    )
    if newest is None or newest.point <= job.saved_step:
        return job
    sources, states = zip(*newest.places, strict=True)
    source = found[sources[0]]
    again = bool(source.since) and source.step == newest.point  # nothing was gained since the loss before
    since = (*source.since, source.since[-1] if again else source.lost_at)
    why, lost = (WHY,) * len(since), tuple(range(len(found)))
    return replace(job, meeting=asdict(Meeting("", sources, lost, why, since, len(since) - 1, states)))
