"""What is seen of a run: what was done to it, and how each start ended."""

from dataclasses import dataclass, field

from benchmarks.campaign.script import Fault, Script


@dataclass
class Done:
    """A fault that was done.

    Attributes:
        start: in which start, or after which one.
        at: when, on ``time.monotonic``'s clock.
        step: the last step that rank 0 had finished.
        rank, pid: whom it was done to.
        second: the same of another rank, where two are killed at once, or of the one whose data worker is.
        idle: whether it was done to a node on which no rank ran at that instant.
        saving: whether a checkpoint was being written just before.
        seen: what was seen of it.
        file: what was damaged.
        restarted: whether the launcher started all ranks again after it.
        gone_s: from the fault until every process was gone, where it was the last one in its start.
    """

    fault: Fault
    start: int
    world_size: int
    step: int
    at: float = 0.0
    rank: int | None = None
    pid: int | None = None
    second: tuple[int, int] | None = None
    idle: bool = False
    saving: bool | None = None
    seen: str | None = None
    file: str | None = None
    restarted: bool = False
    gone_s: float | None = None

    @property
    def pids(self) -> list[int]:
        """The processes that it was done to."""
        return [pid for pid in (self.pid, self.second and self.second[1]) if pid is not None]


@dataclass
class Started:
    """A start and how it ended.

    Attributes:
        alone: whether the process that was started was the only rank itself.
        hung: whether it had to be killed.
        orphans: processes that were left 10 s after it.
        outcome: what ``summary.json`` says of it, if it wrote one.
    """

    world_size: int
    alone: bool
    status: int
    text: str
    seconds: float
    hung: bool
    orphans: int
    outcome: str | None


@dataclass
class Played:
    """All that was seen of a run.

    Attributes:
        copies: how many ranks have each part of the model's state.
        journal: (process, word, number) in the order in which it happened.
    """

    script: Script
    copies: int = 1
    starts: list[Started] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    journal: list[tuple[int, str, int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the last start ended as the whole run should."""
        return bool(self.starts) and (self.starts[-1].status, self.starts[-1].outcome) == (0, "finished")
