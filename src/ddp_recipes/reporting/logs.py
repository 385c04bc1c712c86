"""Where log records go: to ``train.log``, to the terminal, from other ranks to rank 0, from data workers to ranks."""

import json
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from ddp_recipes.errors import printable
from ddp_recipes.reporting.progress import Progress
from ddp_recipes.reporting.run_directory import recording
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.world import World

FAILURE = "ddp_recipes.failure"  # the logger of what ended a run: whoever started the ranks shows it on the terminal


class Plain(logging.Formatter):
    """Write records without control characters, which a terminal would obey: names may come from files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class ForwardHandler(logging.Handler):
    """Sends warnings and errors of a rank that has no log of its own to rank 0."""

    def __init__(self, control: Control) -> None:
        super().__init__(logging.WARNING)
        self.control = control

    def emit(self, record: logging.LogRecord) -> None:
        """Send the formatted record, which gets lost where the store does not answer."""
        self.control.send_log(f"rank {self.control.world.rank}: {self.format(record)}")


class LogFile(logging.FileHandler):
    """Write ``train.log``, with the lines that other ranks sent."""

    def __init__(self, directory: Path, control: Control) -> None:
        super().__init__(directory / "train.log", encoding="utf-8")
        self.setFormatter(Plain("%(asctime)s %(levelname)s %(message)s"))
        self.control = control

    def emit(self, record: logging.LogRecord) -> None:
        with recording(self.baseFilename):
            self._write_received()
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say that a line is not in the file, where the disk takes no more."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        with recording(self.baseFilename):
            raise error

    def close(self) -> None:
        with recording(self.baseFilename):
            self._write_received(last=True)
            super().close()

    def _write_received(self, last: bool = False) -> None:
        for line in self.control.received_logs(last):
            assert self.stream is not None
            self.stream.write(printable(line) + "\n")


class Console(logging.Handler):
    """Print records above the progress bar; where there is no progress, warnings alone, to standard error."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.setFormatter(Plain())
        self.progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == FAILURE:
            return
        if type(self.progress) is Progress and record.levelno >= logging.WARNING:
            print(self.format(record), file=sys.stderr, flush=True)
        else:
            self.progress.line(self.format(record))


class _Lines(threading.local):
    """A stream that writes a line at once, whatever its parts were, and begins it with a text.

    So lines of several processes come whole. In all else it is the other stream.
    """

    def __init__(self, stream: TextIO, prefix: str) -> None:  # once a thread, each of which has its own lines
        self._stream, self._prefix, self._begins, self._held = stream, prefix, True, ""

    def write(self, text: str) -> int:
        """Write a text, of one line or several; keep what is of a line that has not ended."""
        whole, self._held = self._held + text, ""
        for line in whole.splitlines(keepends=True):
            if line.endswith(("\n", "\r")):
                self._write(line)
            else:
                self._held = line
        return len(text)

    def flush(self) -> None:
        """Write what there is."""
        self._write(self._held)
        self._held = ""
        self._stream.flush()

    def _write(self, line: str) -> None:
        if line:
            self._stream.write(f"{self._prefix}{line}" if self._begins else line)
            self._begins = line.endswith(("\n", "\r"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def own_lines(world: World) -> Iterator[None]:
    """Have lines that ranks print themselves come whole, with a rank's number where that is not 0, in any order."""
    prefix = "" if world.is_main else f"rank {world.rank}: "
    out, err = (cast(TextIO, _Lines(stream, prefix)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            for stream in (out, err):
                stream.flush()


# Nothing is forked while a record is handled: a fork would have what the listening thread has locked, a terminal, say.
_LISTENING = threading.RLock()
os.register_at_fork(before=_LISTENING.acquire, after_in_parent=_LISTENING.release, after_in_child=_LISTENING.release)


class _ToParent(logging.Handler):
    """Writes what forks of this process log to a pipe, a line of JSON each."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        name, text = record.name[:256], (whole := self.format(record))
        end = select.PIPE_BUF // 3
        while len(line := json.dumps([name, record.levelno, text]).encode()) >= select.PIPE_BUF:
            text = f"{whole[:end]} … {whole[-end:]}"  # what is longer may come in pieces, between those of others
            end //= 2
        with suppress(BrokenPipeError):  # the process does not listen any more
            os.write(self._pipe, line + b"\n")


@contextmanager
def hearing_forks() -> Iterator[None]:
    """Log here what processes log that are forked meanwhile, as data workers are.

    They have the handlers of this process, but neither its threads nor its connections: what they gave to those would
    wait for an answer, or get lost.
    """
    reading, writing = os.pipe()

    def listen() -> None:
        with os.fdopen(reading, "rb") as file:
            for line in file:
                if line == b"\n":
                    return
                name, level, text = json.loads(line)
                with _LISTENING, suppress(Exception):  # of a user's handler: who writes to the pipe would wait for ever
                    logging.getLogger(name).log(level, "%s", text)

    thread = threading.Thread(target=listen, name="logs of forks", daemon=True)
    thread.start()
    parent, handler = os.getpid(), _ToParent(writing)
    handler.addFilter(lambda record: os.getpid() != parent)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        os.write(writing, b"\n")  # read after all that forks have written by now
        thread.join()
        os.close(writing)


@contextmanager
def handling(handler: logging.Handler) -> Iterator[None]:
    """Give a handler the records of all loggers of this process, from INFO on, and Python's warnings; then close it."""
    root, own = logging.getLogger(), os.getpid()
    handler.addFilter(lambda record: os.getpid() == own)
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO) or logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
        root.setLevel(level)
        logging.captureWarnings(False)
