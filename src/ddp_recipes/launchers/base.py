"""What a launcher is: made from its settings, it has the ranks of a job run and returns rank 0's summary.

And the one that is taken where none is chosen.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ddp_recipes.config.settings import AutoSettings, LauncherSettings, launcher_class
from ddp_recipes.errors import INTERRUPTED, RequestError
from ddp_recipes.launchers.fork_server import ForkServer
from ddp_recipes.reporting.run_directory import Summary, write_text
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.process import loading
from ddp_recipes.runtime.world import World

if TYPE_CHECKING:
    from ddp_recipes.launchers.channel import Channel


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

    def text(self, name: str) -> str:
        """Return what an earlier start left under a name; empty if it left nothing."""
        path = None if self.folder is None else self.folder / name
        return path.read_text(encoding="utf-8") if path is not None and path.exists() else ""

    def write(self, directory: str) -> None:
        """Note the directory of this start, which has begun."""
        if self.folder is not None:
            write_text(self.folder / "run_directory", directory)

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
            return self.note.text("run_directory")
        return self.channel.former_directory(timeout_s)  # torchrun may have made another node the first

    def refuse_started_ranks(self, name: str, hint: str = "start train.py alone") -> None:
        """Refuse a launcher that starts processes of its own in each of several that are running already."""
        if self.world is not None and self.world.world_size > 1:
            raise RequestError(
                f"launcher={name} starts processes of its own, but this is already one of {self.world.world_size} "
                f"(WORLD_SIZE). Use launcher=auto to join them, or {hint}."
            )

    def refuse_jobs_elsewhere(self, launcher: str) -> None:
        """Refuse a launcher of Hydra's whose jobs have processes of their own, where ranks wait for the jobs."""
        if self.world is not None and self.world.world_size > 1 and launcher != "basic":
            raise RequestError(
                f"hydra/launcher={launcher} runs jobs in processes of its own, but this sweep has "
                f"{self.world.world_size} ranks that were started together (WORLD_SIZE). Leave it out, and they run "
                f"one job after the other, or start train.py -m alone."
            )

    def close(self, exit_code: int) -> None:
        """End the fork server, and have the followers exit with this code, if there are any.

        They need not be waited for where a signal came before all had met, which torch may have been loaded for: it
        came to them, too, or whatever started them ends those that are left.
        """
        self.server.close()
        if self.world is None or self.world.world_size == 1:
            return
        if exit_code != INTERRUPTED or ("channel" in vars(self) and self.channel.have_met):
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


@dataclass(frozen=True)
class AutoLauncher:
    """The default: ``env`` in a process that is one of several ranks, else ``local``."""

    settings_class: ClassVar[type[LauncherSettings]] = AutoSettings
    settings: LauncherSettings
    resources: Resources

    def launch(self, job: Job) -> Summary:
        chosen = launcher_class({"name": "local" if self.resources.world is None else "env"})
        summary: Summary = chosen(self.settings, self.resources).launch(job)
        return summary
