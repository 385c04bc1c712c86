"""What a torchrun that restarts its workers needs: the directory in which the run resumes. Loads no torch."""

import os
from collections.abc import Mapping
from pathlib import Path


class RestartNote:
    """A small file in the current folder, while a torchrun with ``--max-restarts`` is at work.

    Each start of the workers composes anew, and would choose another directory: the time is in its name. The first
    start writes its directory, a restart takes it, and the end of the run removes the file. That of another torchrun
    (its agent is another process, and this is its first start) does not count.
    """

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        most, done = (int(environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
        self._on, self._restarted, self._last = most > 0, done > 0, done >= most
        self._path = folder / f".torchrun_{environ.get('TORCHELASTIC_RUN_ID', 'none')}"
        self._agent = f"{os.uname().nodename} {os.getppid()}"

    def former_directory(self) -> str | None:
        """Return the directory of the start before this one, or ``None`` if this is the first."""
        if not self._on or not self._path.exists():
            return None
        agent, directory = self._path.read_text(encoding="utf-8").splitlines()
        return directory if self._restarted or agent == self._agent else None

    def write(self, directory: Path) -> None:
        """Write the directory of this start."""
        if self._on:
            self._path.write_text(f"{self._agent}\n{directory}\n", encoding="utf-8")

    def end(self, exit_code: int) -> None:
        """Remove the file if this exit code is not followed by a restart."""
        if self._on and (exit_code != 1 or self._last):
            self._path.unlink(missing_ok=True)
