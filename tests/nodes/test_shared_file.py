"""A store in a file: what several processes write there at once, and what a killed one leaves."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore

from ddp_recipes.launchers.nodes.shared_file import SharedFile
from helpers.patience import patience
from helpers.processes import until

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
