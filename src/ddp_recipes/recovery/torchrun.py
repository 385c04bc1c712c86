"""States of ranks that are kept for torchrun's next start, and the newest of them. Loads no torch."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.launchers.base import RestartNote
from ddp_recipes.recovery.keeper import Keeper
from ddp_recipes.recovery.memory import Places
from ddp_recipes.recovery.source import Candidate, furthest
from ddp_recipes.reporting.run_directory import write_text
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.regroup import CLOCK_AHEAD, Regroup
from ddp_recipes.runtime.world import World

WHY = "torchrun started all ranks again."  # it says itself which rank it lost


@dataclass(frozen=True)
class Found:
    """What a node has in memory of earlier starts.

    Attributes:
        directory: of the run whose states are in memory.
        states: of each part of the model the steps, and where the state is.
        step: of the newest that was there before the last start.
        since: the :func:`moment` at which each loss before was noticed.
        lost_at: at which this one was.
    """

    directory: str = ""
    states: Sequence[Sequence[tuple[int, str]]] = ()
    step: int = -1
    since: Sequence[float] = ()
    lost_at: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Found":
        """Return what came as JSON, among other things."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


class TorchrunMemory:
    """States of a run's ranks in memory that outlives them, until torchrun ends.

    Args:
        note: of this node's torchrun.
    """

    def __init__(self, note: RestartNote) -> None:
        self._note = note

    def _kept(self) -> tuple[Keeper, Found] | None:
        """Return what keeps states in memory, if it is still there, and of which run."""
        if not (text := self._note.text("memory")):
            return None
        values = json.loads(text)
        keeper = Keeper.of(values["keeper"])
        return (keeper, Found.of(values)) if keeper.lives else None

    def found(self) -> Mapping[str, Any]:
        """Return what earlier starts left on this node, as JSON has it."""
        if (kept := self._kept()) is None:
            return {}
        keeper, found = kept
        states = [[(kept.step, path) for kept, path in Places((pair,)).each()] for pair in keeper.paths]
        return asdict(replace(found, states=states, lost_at=keeper.lost_at))

    def gone_on(self, job: Job, world: World, found: Sequence[Mapping[str, Any]]) -> Job:
        """Return the job as all ranks go on with it: from the newest state in memory, unless a checkpoint is as new.

        Args:
            found: by rank, what its node has.
        """
        return _gone_on(job, _parts(job, world), [Found.of(each) for each in found])

    def places(self, job: Job, world: World, messages: Messages) -> Sequence[str]:
        """Return where this rank keeps its state, if it does; the first one of each node sees to what holds it."""
        parts, name = _parts(job, world), f"keeper/{world.node_rank}"
        if not parts or self._note.folder is None:
            return ()
        if world.local_rank == 0:
            messages.set(name, json.dumps(asdict(self._keeper(self._note.folder, job, parts))))
        if (text := messages.get(name, float(job.config["launcher"]["timeout_s"]))) is None:
            return ()
        keeper = Keeper.of(json.loads(text))
        os.environ[CLOCK_AHEAD] = str(keeper.ahead)  # of the next starts, too
        keeper.watch()
        return keeper.paths[world.rank % parts]

    def _keeper(self, folder: Path, job: Job, parts: int) -> Keeper:
        """Return what keeps the run's states in memory, as many parts: what does so already, or a new one."""
        kept = self._kept()
        if kept is not None and kept[1].directory == str(job.directory) and len(kept[0].paths) == parts:
            keeper = kept[0]
        else:
            self.forget()
            keeper = Keeper.started(parts)
        step = max((kept.step for kept, _ in Places(keeper.paths).each()), default=-1)
        since = [] if job.regroup is None else job.regroup["since"]
        note = {"keeper": asdict(keeper), "directory": str(job.directory), "step": step, "since": since}
        write_text(folder / "memory", json.dumps(note), durable=False)
        return keeper

    def forget(self) -> None:
        """Keep nothing in memory any more."""
        if (kept := self._kept()) is not None:
            kept[0].end()


def _parts(job: Job, world: World) -> int:
    """Return how many different states ranks have, of which each is kept."""
    return strategy_settings(job.config["strategy"]).layout(world.world_size).parts


def _gone_on(job: Job, parts: int, found: Sequence[Found]) -> Job:
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
    return replace(job, regroup=asdict(Regroup("", sources, lost, why, since, len(since) - 1, states)))
