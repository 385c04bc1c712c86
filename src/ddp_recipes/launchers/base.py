"""What a launcher is: made from its settings, it has the ranks of a job run and returns rank 0's summary."""

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ddp_recipes.config.settings import LauncherSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.launchers.elastic import RestartNote
from ddp_recipes.launchers.fork_server import ForkServer
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.process import loading
from ddp_recipes.runtime.world import World

if TYPE_CHECKING:
    from ddp_recipes.launchers.channel import Channel


@dataclass
class Resources:
    """What the controller has before a launcher is chosen, and keeps for all jobs of a sweep.

    Attributes:
        world: its place among ranks that something else started; ``None`` if it was started alone.
        server: forks local ranks; it loads torch while the config is composed.
        note: what torchrun's next start needs.
    """

    world: World | None = None
    server: ForkServer = field(default_factory=ForkServer)
    note: RestartNote = field(default_factory=lambda: RestartNote(os.environ))

    @cached_property
    def channel(self) -> "Channel":
        """The connection to the other ranks, made when it is first needed: it loads torch."""
        with loading():
            from ddp_recipes.launchers.channel import Channel

        assert self.world is not None
        return Channel(self.world, self.note)

    def former_directory(self, timeout_s: float, fresh: bool) -> str:
        """Return the directory in which torchrun started this run before, on any node; empty if it did not.

        Raises:
            RequestError: it did, but the directory is lost, and a ``fresh`` one would be taken.
        """
        if fresh:
            self.note.refuse_lost()
        if not self.note.on or self.world is None or self.world.nnodes == 1:
            return self.note.read()
        return self.channel.former_directory(timeout_s)  # torchrun may have made another node the first

    def refuse_started_ranks(self, name: str, hint: str = "start train.py alone") -> None:
        """Refuse a launcher that starts processes of its own in each of several that are running already."""
        if self.world is not None and self.world.world_size > 1:
            raise RequestError(
                f"launcher={name} starts processes of its own, but this is already one of {self.world.world_size} "
                f"(WORLD_SIZE). Use launcher=auto to join them, or {hint}."
            )

    def close(self, exit_code: int) -> None:
        """End the fork server, and have the followers exit with this code, if there are any."""
        self.server.close()
        if self.world is not None and self.world.world_size > 1:
            self.channel.stop(exit_code)


class Launcher(Protocol):
    """Starts the ranks of a job, or joins those that are running. A yaml's ``_target_`` names its class.

    Attributes:
        settings_class: the keys of the yaml, typed; the config is checked by it before a launcher is made.
    """

    settings_class: ClassVar[type[LauncherSettings]]

    def __init__(self, settings: Any, resources: Resources) -> None: ...

    def launch(self, job: Job) -> Summary:
        """Run a job and return rank 0's summary.

        Raises:
            RequestError: the job cannot be run; nothing was started.
            Preempted: a signal stopped it after a checkpoint was saved.
            RunFailed: a rank failed; its traceback is the message.
            KeyboardInterrupt: interrupted before a checkpoint was saved.
        """
        ...
