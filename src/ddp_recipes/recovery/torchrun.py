"""States of ranks that are kept for torchrun's next start, and the newest of them. Loads no torch."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ddp_recipes.config.parallelism import strategy_settings
from ddp_recipes.launchers.base import RestartNote
from ddp_recipes.recovery.memory import SnapshotSlots
from ddp_recipes.recovery.snapshot_holder import SnapshotHolder
from ddp_recipes.recovery.source import CLOCK_AHEAD, Candidate, furthest
from ddp_recipes.reporting.run_directory import write_text
from ddp_recipes.runtime.job import Job, Regroup
from ddp_recipes.runtime.messages import Messages
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

    def _held(self) -> tuple[SnapshotHolder, Found] | None:
        """Return what keeps states in memory, if it is still there, and of which run."""
        if not (text := self._note.text("memory")):
            return None
        values = json.loads(text)
        holder = SnapshotHolder.of(values["snapshot_holder"])
        return (holder, Found.of(values)) if holder.lives else None

    def found(self) -> Mapping[str, Any]:
        """Return what earlier starts left on this node, as JSON has it."""
        if (held := self._held()) is None:
            return {}
        holder, found = held
        states = [[(snapshot.step, path) for snapshot, path in SnapshotSlots((pair,)).each()] for pair in holder.paths]
        return asdict(replace(found, states=states, lost_at=holder.lost_at))

    def gone_on(self, job: Job, world: World, found: Sequence[Mapping[str, Any]]) -> Job:
        """Return the job as all ranks go on with it: from the newest state in memory, unless a checkpoint is as new.

        Args:
            found: by rank, what its node has.
        """
        return _gone_on(job, _parts(job, world), [Found.of(each) for each in found])

    def slots(self, job: Job, world: World, messages: Messages) -> Sequence[str]:
        """Return where this rank keeps its state, if it does; the first one of each node sees to what holds it."""
        parts, name = _parts(job, world), f"snapshot_holder/{world.node_rank}"
        if not parts or self._note.folder is None:
            return ()
        if world.local_rank == 0:
            messages.set(name, json.dumps(asdict(self._holder(self._note.folder, job, parts))))
        if (text := messages.get(name, float(job.config["launcher"]["timeout_s"]))) is None:
            return ()
        holder = SnapshotHolder.of(json.loads(text))
        os.environ[CLOCK_AHEAD] = str(holder.ahead)  # of the next starts, too
        holder.watch()
        return holder.paths[world.rank % parts]

    def _holder(self, folder: Path, job: Job, parts: int) -> SnapshotHolder:
        """Return what keeps the run's states in memory, as many parts: what does so already, or a new one."""
        held = self._held()
        if held is not None and held[1].directory == str(job.directory) and len(held[0].paths) == parts:
            holder = held[0]
        else:
            self.forget()
            holder = SnapshotHolder.started(parts)
        step = max((snapshot.step for snapshot, _ in SnapshotSlots(holder.paths).each()), default=-1)
        since = [] if job.regroup is None else job.regroup["since"]
        note = {"snapshot_holder": asdict(holder), "directory": str(job.directory), "step": step, "since": since}
        write_text(folder / "memory", json.dumps(note), durable=False)
        return holder

    def forget(self) -> None:
        """Keep nothing in memory any more."""
        if (held := self._held()) is not None:
            held[0].end()


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
