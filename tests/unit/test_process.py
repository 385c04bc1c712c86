"""A process that leaves early loses nothing that one which ends as usual would have kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patience import patience

LEAVES = """\
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from ddp_recipes.runtime.process import leave

def late(text, *wait):
    time.sleep(*wait or [0])
    print(text)

atexit.register(late, "a handler")
threading.Thread(target=late, args=["a thread", 0.2]).start()
pool = ThreadPoolExecutor(1)
pool.submit(late, "a pool")
unclosed = open("unclosed.txt", "w")
unclosed.write("kept")
sys.stderr.write("no newline")
leave(0)
"""


@pytest.mark.parametrize("way", [[], ["-m", "cProfile", "-o", "profile"]], ids=["alone", "under a profiler"])
def test_what_waits_for_the_end_of_a_process_that_leaves_is_done(way: list[str], tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    done = subprocess.run(
        [sys.executable, *way, "leaves.py"], cwd=tmp_path, capture_output=True, text=True, timeout=patience(30)
    )
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["a handler", "a pool", "a thread"]
    assert done.stderr == "no newline"
    assert (tmp_path / "unclosed.txt").read_text() == "kept"
    assert (tmp_path / "profile").exists() == bool(way)


@pytest.mark.skipif("COVERAGE_PROCESS_CONFIG" in os.environ, reason="what is traced exits by sys.exit, which waits")
def test_a_process_that_failed_waits_for_no_thread(tmp_path: Path) -> None:
    lines = ["import threading", "from ddp_recipes.runtime.process import leave"]
    lines += ["threading.Thread(target=threading.Event().wait).start()", "leave(1)"]
    (tmp_path / "leaves.py").write_text("\n".join(lines))
    assert subprocess.run([sys.executable, "leaves.py"], cwd=tmp_path, timeout=patience(30)).returncode == 1


def test_a_process_that_failed_ends_its_pool_of_processes_and_does_not_wait_for_it(tmp_path: Path) -> None:
    lines = ["from concurrent.futures import ProcessPoolExecutor", "from ddp_recipes.runtime.process import leave"]
    lines += ["pool = ProcessPoolExecutor(1)", "print(pool.submit(__import__('os').getpid).result(), flush=True)"]
    (tmp_path / "leaves.py").write_text("\n".join([*lines, "leave(1)"]))
    done = subprocess.run([sys.executable, "leaves.py"], cwd=tmp_path, stdout=subprocess.PIPE, timeout=patience(30))
    assert done.returncode == 1
    assert not Path(f"/proc/{int(done.stdout)}").exists()
