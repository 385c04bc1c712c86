"""What a torchrun that starts its workers again needs: where the run goes on. Loads no torch."""

from collections.abc import Mapping
from pathlib import Path

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import write_text


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
        return self.text("run_directory")

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
