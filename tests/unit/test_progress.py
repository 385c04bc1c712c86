"""The bar on a terminal, the lines elsewhere, and the tables."""

import io
import os
import re
import select
import threading
import time
from pathlib import Path

import pytest

from ddp_recipes import rank
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.progress import Bar, Lines, Progress, make_progress, table
from ddp_recipes.testing import make_job, on_ranks


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def plain(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("choice", "stream", "kind"),
    [
        ("auto", Terminal(), Bar),
        ("auto", io.StringIO(), Lines),
        (True, io.StringIO(), Bar),
        ("bar", io.StringIO(), Bar),
        ("lines", Terminal(), Lines),
        (False, Terminal(), Progress),
    ],
)
def test_choices(choice: str | bool, stream: io.StringIO, kind: type[Progress]) -> None:
    assert type(make_progress(choice, stream)) is kind


def test_auto_draws_no_bar_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_progress("auto", Terminal())) is Lines


def test_unknown_choice_offers_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"trainer\.progress=line is not known.*Did you mean 'lines'\?"):
        make_progress("line", io.StringIO())


def test_bar_shows_where_the_run_is() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.start(total_steps=200, first_step=0, samples_per_step=16)
    bar.metrics({"train/loss": 0.12345, "train/grad_norm": 3.0, "samples_per_second": 4321.0})
    bar.advance(50, epoch=2)
    bar.stop()
    last = stream.plain().rstrip().rsplit("\r", 1)[-1]
    assert re.match(r"epoch 2 .*step 50/200  loss 0\.1235?  4321 samples/s  0:00 left", last)


@pytest.mark.parametrize(("columns", "shown"), [("60", "…"), ("30", "…"), ("100", "left")])
def test_bar_keeps_to_one_line(columns: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    bar = Bar(stream)
    bar.start(total_steps=400_000, first_step=0, samples_per_step=16)
    bar.metrics({"train/loss": 0.012345, "samples_per_second": 73957.0})
    bar.advance(11_187, epoch=2)
    bar.stop()
    last = stream.plain().rstrip("\n").rsplit("\r", 1)[-1]
    assert len(last) == int(columns)
    assert last.startswith("epoch 2 ")
    assert last.endswith(shown)


def test_bar_draws_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = Terminal()
    bar = Bar(stream)
    bar.start(total_steps=1000, first_step=0, samples_per_step=1)
    bar.advance(1, 0)
    drawn = stream.tell()
    for step in range(2, 500):
        bar.advance(step, 0)
    assert stream.tell() == drawn
    now += Bar.every
    bar.advance(500, 0)
    assert "step 500/1000" in stream.plain()
    bar.advance(1000, 1)
    bar.stop()
    assert "step 1000/1000" in stream.plain(), "the last state is shown, however soon it came"


def test_bar_starts_no_thread_and_gives_the_terminal_back() -> None:
    threads = threading.active_count()
    stream = Terminal()
    bar = Bar(stream)
    bar.start(total_steps=None, first_step=0, samples_per_step=1)
    bar.advance(7, 0)
    assert threading.active_count() == threads
    bar.stop()
    bar.stop()
    assert stream.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is visible again"
    assert "step 7 " in stream.plain()


def test_bar_prints_lines_above_itself_and_as_they_are() -> None:
    stream = Terminal()
    bar = Bar(stream)
    bar.line("before")
    bar.start(total_steps=10, first_step=0, samples_per_step=1)
    bar.line("epoch 1: [bold]val/loss[/bold] 0.5")
    bar.stop()
    lines = stream.plain().replace("\r", "\n").splitlines()
    assert lines[0] == "before"
    assert "epoch 1: [bold]val/loss[/bold] 0.5" in lines


def test_bar_on_a_real_terminal() -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as stream:
        bar = make_progress("auto", stream)
        bar.start(total_steps=10, first_step=0, samples_per_step=1)
        bar.advance(10, 0)
        bar.stop()
        shown = ""
        while "step 10/10" not in shown and select.select([leader], [], [], 10.0)[0]:  # a terminal passes on in pieces
            shown += os.read(leader, 65536).decode()
    os.close(leader)
    assert type(bar) is Bar
    assert "step 10/10" in shown


def test_lines_come_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    lines = Lines(stream)
    lines.start(total_steps=100, first_step=20, samples_per_step=8)
    for step in range(21, 61):
        now += 1.0
        lines.advance(step, epoch=1)
        if step == 30:
            lines.metrics({"train/loss": 1 / step})
    lines.line("epoch 1: val/loss 0.5")
    lines.stop()
    assert stream.getvalue().splitlines() == [
        "epoch 1  step 25/100  8 samples/s  1:15 left",
        "epoch 1  step 55/100  loss 0.03333  8 samples/s  0:45 left",
        "epoch 1: val/loss 0.5",
    ]


def test_long_times_have_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    lines = Lines(stream)
    lines.start(total_steps=733, first_step=0, samples_per_step=0)
    now += 5
    lines.advance(1, epoch=0)
    assert stream.getvalue() == "epoch 0  step 1/733  1:01:00 left\n"


def test_nothing_is_shown_without_progress(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.start(10, 0, 1)
    progress.advance(1, 0)
    progress.metrics({"loss": 1.0})
    progress.line("text")
    progress.stop()
    assert tuple(capfd.readouterr()) == ("", "")


def test_table_in_plain_text() -> None:
    stream = io.StringIO()
    table("Run", [("model", "toy"), ("parameters", "165 [all]")], stream)
    assert stream.getvalue() == "Run\n  model       toy\n  parameters  165 [all]\n"


def test_table_on_a_terminal() -> None:
    stream = Terminal()
    table("Run", [("model", "toy"), ("parameters", "165 [all]")], stream)
    assert re.search(r"│ parameters │ 165 \[all\] │", stream.plain())


@pytest.mark.parametrize("width", [20, 40, 79, 80])
def test_a_path_is_never_broken_to_fit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream, path = Terminal(), f"outputs/{'x' * 49}/best.pt"
    table("finished in 0.4 s", [("val/loss", "0.1"), ("best", path)], stream)
    assert path in stream.plain()
    assert ("╭" in stream.plain()) == (width == 80)


def test_a_run_ends_where_its_current_folder_has_been_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    job = make_job(["data=random", "model=toy", "trainer.max_steps=1", "launcher.nproc_per_node=1"], tmp_path / "run")
    gone.rmdir()
    assert on_ranks(lambda world, store: rank.run(job, world, None), 1)[0]["status"] == "finished"
