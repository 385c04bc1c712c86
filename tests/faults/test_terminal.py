"""What a run shows: a bar on a terminal, which is left as it was; plain lines elsewhere; no secret, no open port."""

import fcntl
import hashlib
import os
import pty
import re
import socket
import struct
import sys
import termios
import uuid
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

import pytest

from helpers import processes
from helpers.patience import patience
from helpers.processes import GONE_S, START_S, TORCHRUN, TWO, Run, kill, ran, started, summary, until, until_saved

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

SMALL = [*processes.SMALL, TWO]
ENDLESS = [*processes.ENDLESS, TWO]

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def shown(folder: Path, *overrides: str, meanwhile: Callable[[Run, int], None] | None = None) -> tuple[int, str]:
    """Run on a terminal of its own and return the exit status and all that it showed.

    Args:
        meanwhile: called with the run and the keyboard's end of the terminal.
    """
    keyboard, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    with started(folder, *overrides, environ={"TERM": "xterm-256color"}, terminal=screen) as run:
        os.close(screen)
        text = b""
        os.set_blocking(keyboard, False)

        def ended() -> bool:
            nonlocal text
            try:
                while chunk := os.read(keyboard, 1 << 16):
                    text += chunk
            except BlockingIOError:
                return False
            except OSError:  # nobody has the terminal open any more
                pass
            return True

        if meanwhile is not None:
            until(lambda: ended() or (folder / "run" / "checkpoints" / "last.pt").exists(), START_S, "no checkpoint")
            meanwhile(run, keyboard)
        until(ended, START_S, "the terminal is still in use")
        status = run.process.wait(patience(GONE_S))
        run.see_all_gone()
    os.close(keyboard)
    return status, text.decode()


def see_left_as_it_was(text: str) -> None:
    """See that the cursor is shown again and that all that steered the terminal was complete."""
    assert text.count(HIDE) > 0, "there was no bar"
    assert text.rindex(SHOW) > text.rindex(HIDE), "the cursor stays hidden"
    assert "\x1b" not in ESCAPE.sub("", text)
    assert text.endswith("\n")


def test_a_terminal_shows_tables_and_a_bar_and_is_left_as_it_was(folder: Path) -> None:
    status, text = shown(folder, *SMALL)
    assert status == 0
    see_left_as_it_was(text)
    plain = ESCAPE.sub("", text)
    assert (
        plain.index("replicas x devices") < plain.index("━") < plain.index("finished in") < plain.index("tensorboard")
    )
    assert plain.count("replicas x devices") == 1, "rank 0 alone shows"
    assert "step 30/30" in plain
    assert "epoch 3  step 30  val/loss" in plain


def test_ctrl_c_at_the_terminal_saves_and_leaves_the_terminal_as_it_was(folder: Path) -> None:
    def press_ctrl_c(run: Run, keyboard: int) -> None:
        os.write(keyboard, b"\x03")

    status, text = shown(folder, *ENDLESS, meanwhile=press_ctrl_c)
    assert status == 75
    see_left_as_it_was(text)
    assert "Stopped by " in text


def test_a_rank_that_is_killed_while_it_draws_leaves_the_terminal_as_it_was(folder: Path) -> None:
    status, text = shown(folder, *ENDLESS, meanwhile=lambda run, keyboard: kill(run.rank(0), SIGKILL))
    assert status == 1
    see_left_as_it_was(text)
    assert "was killed by SIGKILL" in text


@pytest.mark.nightly
def test_an_exception_leaves_the_terminal_as_it_was(folder: Path) -> None:
    overrides = ["model._target_=own_models.Faulty", "+model.what=raise", "+model.rank=1"]
    status, text = shown(folder, *SMALL, *overrides)
    assert status == 1
    see_left_as_it_was(text)
    assert "Rank 1 failed:" in text


def test_without_a_terminal_there_are_plain_lines(folder: Path) -> None:
    ended = ran(folder, *SMALL)
    assert ended.status == 0
    assert ended.err == ""
    assert "\x1b" not in ended.out
    assert "\r" not in ended.out
    for words in ("  replicas x devices  2 x 1", "epoch 3  step 30  val/loss", "finished in "):
        assert words in ended.out
    assert "\x1b" not in (folder / "run" / "train.log").read_text()


@pytest.mark.parametrize(
    "command", [pytest.param(None, id="local", marks=pytest.mark.nightly), pytest.param(TORCHRUN, id="torchrun")]
)
def test_a_secret_of_the_environment_reaches_every_rank_and_no_file(command: list[str] | None, folder: Path) -> None:
    secret = f"s3cr3t-{uuid.uuid4()}"
    overrides = [
        "model._target_=own_models.Secretive",
        "+model.token=${oc.env:MY_SECRET}",
        f"+model.digest='{hashlib.sha256(secret.encode()).hexdigest()}'",
    ]
    ended = ran(folder, *SMALL, *overrides, command=command, environ={"MY_SECRET": secret})
    assert ended.status == 0, ended.err
    assert secret not in ended.out + ended.err
    assert all(f"rank {rank} has the token" in ended.out for rank in (0, 1))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert (folder / "run" / "summary.json") in files
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert "token: ${oc.env:MY_SECRET}" in (folder / "run" / "config.yaml").read_text()


def test_a_secret_of_the_environment_is_in_no_file_of_a_sweep(folder: Path) -> None:
    secret = f"s3cr3t-{uuid.uuid4()}"
    overrides = ["model._target_=own_models.Secretive", "+model.token=${oc.env:MY_SECRET}", "+model.digest=wrong,other"]
    ended = ran(folder, "-m", *SMALL, *overrides, "launcher.nproc_per_node=1", environ={"MY_SECRET": secret})
    assert ended.status == 1, "no digest fits, so each job fails"
    assert secret not in ended.out + ended.err
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "sweep.csv" for path in files)
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_a_local_run_listens_on_loopback_only(folder: Path) -> None:
    with started(folder, *ENDLESS) as run:
        until_saved(run, folder / "run")
        addresses = listening(set(run.pids()))
    assert "127.0.0.1" in addresses, "where the ranks meet"
    assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def listening(pids: set[int]) -> set[str]:
    """Return the addresses that processes listen on, as ``ss -ltn`` would."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if (name := os.readlink(link)).startswith("socket:["):
                inodes.add(name[8:-1])
    addresses = set()
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:  # 0A: listening
                words = bytes.fromhex(local.split(":")[0])  # each 4 bytes as a number of this machine
                raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                addresses.add(socket.inet_ntop(family, raw))
    return addresses


@pytest.mark.parametrize(
    "overrides", [pytest.param(["launcher.nproc_per_node=1"], marks=pytest.mark.nightly), [TWO], ["--cfg", "job"]]
)
def test_a_run_goes_on_when_its_reader_does_not(overrides: list[str], folder: Path) -> None:
    command = ["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", sys.executable]
    ended = ran(folder, *processes.SMALL, *overrides, command=command)
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("\n") == 1
    if "--cfg" not in overrides:
        assert summary(folder / "run")["status"] == "finished"


@pytest.mark.parametrize(("redirection", "said"), [(">/dev/full", "Standard output takes no more"), (">&-", "")])
def test_a_run_goes_on_where_nothing_can_be_printed(redirection: str, said: str, folder: Path) -> None:
    command = ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable]
    ended = ran(folder, *processes.SMALL, "launcher.nproc_per_node=1", command=command)
    assert (ended.status, ended.out) == (0, "")
    assert ended.err.startswith(said)
    assert ended.err.count("\n") == bool(said)
    assert summary(folder / "run")["status"] == "finished"
