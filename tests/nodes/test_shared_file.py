"""A store in a file: what several processes write there at once, and what a killed one leaves."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore

from ddp_recipes.errors import RequestError
from ddp_recipes.launchers.nodes.rendezvous import open_store
from ddp_recipes.launchers.nodes.shared_file import SharedFile
from helpers.patience import patience
from helpers.processes import OWN_MODELS, SMALL, START_S, Run, started, until

COUNT = """
import sys
from pathlib import Path
from ddp_recipes.launchers.nodes.shared_file import SharedFile

store, (_, times, name) = SharedFile(Path("meet"), 60), sys.argv
seen = store.compare_set("count", "", "0").decode()
for turn in range(int(times)):
    while True:  # each value but once, or two could take the same one for their own
        mine = f"{int(seen.split()[0]) + 1} {name} {turn}"
        seen = store.compare_set("count", seen, mine).decode()
        if seen == mine:
            break
    store.set(name, seen)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a user's own models in it."""
    shutil.copy(OWN_MODELS, tmp_path)
    return tmp_path


def count(folder: Path, times: int, name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", COUNT, str(times), name], cwd=folder)


@pytest.mark.spawn
@pytest.mark.slow
def test_what_processes_write_at_once_is_all_there(tmp_path: Path) -> None:
    processes = [count(tmp_path, 100, name) for name in "abc"]
    assert [process.wait(patience(60)) for process in processes] == [0, 0, 0]
    store = SharedFile(tmp_path / "meet", 60)
    assert store.get("count").split()[0] == b"300"
    assert store.get("count") in [store.get(name) for name in "abc"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meet", "meet.lock"]


@pytest.mark.slow
@pytest.mark.spawn
def test_a_process_that_is_killed_as_it_writes_holds_up_nobody(tmp_path: Path) -> None:
    store = SharedFile(tmp_path / "meet", 60)
    for name in "ab":
        process = count(tmp_path, 1_000_000, name)
        until(lambda name=name: store.check([name]), 60, "it does not write")  # type: ignore[misc]
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(patience(10)) == -signal.SIGKILL
        assert store.compare_set("count", store.get("count"), "0 again") == b"0 again"


def test_it_is_a_store_like_those_of_torch(tmp_path: Path) -> None:
    file = SharedFile(tmp_path / "meet", 60)
    store = PrefixStore("run", file)
    store.set("key", b"\x00\xffvalue")
    assert (store.get("key"), store.check(["key"]), store.check(["key", "none"])) == (b"\x00\xffvalue", True, False)
    assert store.compare_set("key", "other", "new") == b"\x00\xffvalue"
    assert store.compare_set("none", "other", "new") == b"other"
    with pytest.raises(RuntimeError, match=r"Timed out after 0\.1 seconds"):
        store.wait(["none"], timedelta(seconds=0.1))


def test_what_a_run_has_left_is_emptied_once_nobody_has_written_for_long(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    SharedFile(path, 60).set("key", "value")
    assert SharedFile(path, 60).check(["key"])
    os.utime(path, (0, 0))
    assert not SharedFile(path, 60).check(["key"])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pipe", "no regular file"),
        ("folder", "no regular file"),
        ("half", "is damaged"),
        ("list", "is damaged"),
        ("other", "is another file"),
        pytest.param("locked", "has kept .*meet.lock locked for 10 seconds", marks=pytest.mark.nightly),
    ],
)
def test_what_nodes_cannot_meet_in_is_refused_in_time(what: str, message: str, tmp_path: Path) -> None:
    path, lock = tmp_path / "meet", tmp_path / "meet.lock"
    begun = b"ddp_recipes: nodes of a run meet here\n"
    with lock.open("w") as file:
        if what == "locked":
            fcntl.flock(file, fcntl.LOCK_EX)
        elif what in ("pipe", "folder"):
            {"pipe": os.mkfifo, "folder": os.mkdir}[what](path)
        else:
            path.write_bytes({"half": begun + b'{"key": "va', "list": begun + b"[1]", "other": b"a diary"}[what])
        with pytest.raises(RequestError, match=message):
            open_store(f"file://{path}", "127.0.0.1", 60)


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_that_waits_for_the_file(number: int, folder: Path) -> None:
    """Another process has it locked: the node waits for longer than this test does."""
    alone = [
        "launcher.local_addr=127.0.0.1",
        "launcher.nproc_per_node=1",
        "launcher.min_nodes=2",
        f"launcher.rdzv_endpoint=file://{folder}/meet",
    ]
    key, lock = {"DDP_RECIPES_KEY": "a secret that these nodes have"}, folder / "meet.lock"

    def opened(pid: int) -> bool:
        found = set[str]()
        for each in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it was closed since
                found.add(os.readlink(f"/proc/{pid}/fd/{each}"))
        return str(lock) in found

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with started(folder, *SMALL, "launcher=nodes", *alone, environ=key) as run:
            until(lambda: opened(run.pid), START_S, "it does not open the file")
            run.signal(number)
            ended = run.end()
    assert ended.status == 130
    assert "locked" not in ended.err


@pytest.mark.spawn
@pytest.mark.slow
def test_a_message_of_an_earlier_run_with_the_same_key_leads_nobody_to_a_stranger(folder: Path) -> None:
    """It says at which port ranks meet, where a stranger listens by now, who writes it again all the time."""
    key = {"DDP_RECIPES_KEY": "a secret that these nodes have"}
    alone = ["launcher.local_addr=127.0.0.1", "launcher.nproc_per_node=1", "launcher.min_nodes=2"]
    own = [*SMALL, "launcher=nodes", *alone]

    def node(number: int) -> Run:
        meets = [f"launcher.rdzv_endpoint=file://{folder}/meet_{number}", f"hydra.run.dir={folder}/run_{number}"]
        return stack.enter_context(started(folder, *own, *meets, "logger=none", environ=key))

    with ExitStack() as stack:
        both = [node(1), node(1)]
        assert [run.end().status for run in both] == [0, 0]
        signed = next(value for name, value in values_in(folder / "meet_1").items() if name.endswith("/port"))
        stranger = stack.enter_context(socket.create_server(("127.0.0.1", int(signed.partition(":")[2]))))
        stranger.setblocking(False)
        meeting, both = SharedFile(folder / "meet_2", 3600), [node(2), node(2)]

        def over() -> bool:
            names = [name for name in values_in(folder / "meet_2") if name.endswith("/0")]
            for name in {name.rpartition("/")[0].rpartition("/")[0] for name in names}:
                meeting.set(f"{name}/port", signed)
            return any(run.process.poll() is not None for run in both)

        until(over, 2 * START_S, "it does not end")
        with pytest.raises(BlockingIOError):
            stranger.accept()
        if (run := next(run for run in both if run.process.poll() is not None)).process.poll():
            assert "/port in the store where ranks meet was not written with this rank's key" in run.end().err


def values_in(path: Path) -> dict[str, str]:
    """Return what is in the file in which nodes meet."""
    found: dict[str, str] = json.loads(path.read_text().partition("\n")[2])
    return found
