"""What a run shows: a bar on a terminal, plain lines elsewhere, and tables before and after."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from ddp_recipes.errors import not_one_of, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live


class Progress:
    """Show nothing; a base for progress that shows."""

    def start(self, total_steps: int | None, first_step: int, samples_per_step: int) -> None:
        """Begin at ``first_step`` (not 0 on resume) of ``total_steps`` (None: not known beforehand)."""

    def advance(self, step: int, epoch: int) -> None:
        """Note that ``step`` optimizer steps are done. Called every step: mostly it looks at the clock and returns."""

    def metrics(self, values: Mapping[str, float]) -> None:
        """Take the latest numbers; those named ``…loss``, ``…samples_per_second`` and ``…/mfu`` are shown."""

    def line(self, text: str) -> None:
        """Print a line of its own."""

    def stop(self) -> None:
        """Show the last state and leave the terminal as it was. Safe to call twice."""


class _Shown(Progress):
    """Where the run is, and the text that says so, for a bar and for lines."""

    every: float  # seconds between looks

    _total: int | None = None
    _first = _step = _epoch = _samples_per_step = 0
    _began = _due = 0.0
    _loss: float | None = None
    _rate: float | None = None
    _mfu: float | None = None

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, total_steps: int | None, first_step: int, samples_per_step: int) -> None:
        self._total = total_steps
        self._first = self._step = first_step
        self._samples_per_step = samples_per_step
        self._began = time.monotonic()

    def advance(self, step: int, epoch: int) -> None:
        self._step, self._epoch = step, epoch
        if time.monotonic() >= self._due:
            self._show()
            self._due = time.monotonic() + self.every

    def _show(self) -> None:
        """Show it now."""

    def metrics(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name.endswith("loss"):
                self._loss = value
            elif name.endswith("samples_per_second"):
                self._rate = value
            elif name.endswith("/mfu"):
                self._mfu = value

    def line(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)

    def _status(self) -> str:
        """Return ``step 50/560  loss 0.1234  1234 samples/s  0:12 left``, as far as it is known."""
        steps_per_second = (self._step - self._first) / max(time.monotonic() - self._began, 1e-9)
        rate = steps_per_second * self._samples_per_step if self._rate is None else self._rate
        text = f"step {self._step}" if self._total is None else f"step {self._step}/{self._total}"
        if self._loss is not None:
            text += f"  loss {self._loss:.4g}"
        if rate:
            text += f"  {rate:.0f} samples/s"
        if self._mfu is not None:
            text += f"  {self._mfu:.1%} MFU"
        if self._total is not None and steps_per_second:
            text += f"  {_clock((self._total - self._step) / steps_per_second)} left"
        return text


class Bar(_Shown):
    """A bar in the last line of a terminal. The calling thread draws it, by the clock: there is no other thread.

    Not ``rich.progress``, of which it uses the pieces: that lays out a table, so a drawing takes four times as long
    (``benchmarks/progress.py``), and where the terminal is narrow it shortens each column, not only what comes last.
    """

    every = 0.2  # seconds

    _live: Live | None = None

    def start(self, total_steps: int | None, first_step: int, samples_per_step: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self.stop()
        super().start(total_steps, first_step, samples_per_step)
        self._live = Live(
            self,
            console=Console(file=self._stream, force_terminal=True),
            auto_refresh=False,
            # What others print lands above the bar, unless it goes to a file.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        self._live.start()

    def _show(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def line(self, text: str) -> None:
        if self._live is None:
            super().line(text)
        else:
            self._live.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()  # draws once more
            self._live = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the line."""
        from rich.progress_bar import ProgressBar
        from rich.segment import Segment

        left, right = f"epoch {self._epoch} ", f" {self._status()}"
        room = options.max_width - len(left) - len(right)
        if room < 0:  # the terminal is narrow
            right = f"{right[: room - 1]}…"
        yield Segment(left)
        if room > 0:
            yield ProgressBar(total=self._total, completed=self._step, width=room)
        yield Segment(right)


class Lines(_Shown):
    """A plain line by the clock, for logs and pipes: however slow the steps are, they show that they go on."""

    first, every = 5.0, 30.0  # seconds

    def start(self, total_steps: int | None, first_step: int, samples_per_step: int) -> None:
        super().start(total_steps, first_step, samples_per_step)
        self._due = self._began + self.first

    def _show(self) -> None:
        self.line(f"epoch {self._epoch}  {self._status()}")


def make_progress(choice: str | bool, stream: TextIO) -> Progress:
    """Return what ``trainer.progress`` asks for; ``auto`` is a bar on a terminal and lines elsewhere."""
    if choice == "auto":
        choice = "bar" if _is_terminal(stream) else "lines"
    if choice is True or choice == "bar":
        return Bar(stream)
    if choice == "lines":
        return Lines(stream)
    if choice is False:
        return Progress()
    raise not_one_of("trainer.progress", choice, ("auto", "bar", "lines", "true", "false"))


def table(title: str, rows: Sequence[tuple[str, str]], stream: TextIO) -> None:
    """Print two columns under a title, in a box on a terminal that has room for it: a path is not broken to fit."""
    rows = [(printable(name), printable(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    box = width + max((len(value) for _, value in rows), default=0) + len("│  │  │")
    if not _is_terminal(stream) or box > shutil.get_terminal_size().columns:
        print(title, *(f"  {name:<{width}}  {value}" for name, value in rows), sep="\n", file=stream, flush=True)
        return
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", show_header=False, box=ROUNDED)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    Console(file=stream).print(grid)


def number(value: float) -> str:
    """Return a number as a person reads it: ``0.0312``, ``28,979``."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def in_bytes(size: float) -> str:
    """Return a number of bytes as a person reads it, in powers of 1000: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
