"""A save that is killed, refused by the disk, or slow: the newest whole checkpoint is always there to go on from."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import pytest

from ddp_recipes.checkpointing.files import find, newest_first
from ddp_recipes.checkpointing.manager import FileCheckpointer
from ddp_recipes.checkpointing.reading import load, load_first
from ddp_recipes.errors import RecipeError
from ddp_recipes.runtime.tensors import digest
from helpers.checkpoints import checkpointer, mounted, plain, state_of, steps_in
from helpers.marks import slow_but
from helpers.pairs import pairwise
from helpers.patience import patience, timeout_s
from helpers.processes import GONE_S, START_S, kill, ran, started, summary, until, until_saved

ROWS = 700_000  # of 12 bytes: two blocks that go past the page cache, and a rest

# What a save asks of the system, by all the names that Python and libc may have for it.
CALLS = ("write", "fsync", "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat")


# --- strace, which cuts in between a process and the system ----------------------------------------------------------


@contextmanager
def tampered(pid: int, log: Path, *injections: str) -> Iterator[Path]:
    """Attach strace to all threads of a process; yield its log of the calls that ``injections`` are about."""
    calls = ",".join(injection.split(":")[0] for injection in injections)
    command = ["strace", "-f", "-p", str(pid), "-o", str(log), "-e", f"trace={calls}"]
    for injection in injections:
        command += ["-e", f"inject={injection}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        try:
            assert strace.stderr is not None
            line = strace.stderr.readline()
            if "attached" not in line:
                pytest.skip(f"strace cannot attach: {line.strip()}")
            yield log
        finally:
            if Path(f"/proc/{pid}").exists():
                strace.kill()  # which lets go of the process, also in the midst of a call that it holds up


@pytest.fixture(autouse=True, scope="module")
def needs_strace() -> None:
    if sys.platform != "linux" or shutil.which("strace") is None:
        pytest.skip("strace, which makes calls of the system fail, is not installed")


def forked(work: Callable[[], str], log: Path, injection: str) -> tuple[int, str]:
    """Do some work in a fork of this process, tampered with; return its wait status and what it printed at the end."""
    go_read, go_write = os.pipe()
    said_read, said_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.read(go_read, 1)
            os.write(said_write, work().encode())
            status = 0
        finally:
            os._exit(status)
    os.close(go_read)
    os.close(said_write)
    try:
        with tampered(pid, log, injection):
            os.write(go_write, b"!")
            _, status = os.waitpid(pid, 0)
    except BaseException:
        kill(pid, SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(go_write)
        with os.fdopen(said_read) as pipe:
            message = pipe.read()
    return status, message


def saved_twice(folder: Path) -> FileCheckpointer:
    """Return a saver that has saved step 1, the best, and 2."""
    keeper = checkpointer(folder / "checkpoints")
    for step, value in ((1, 0.1), (2, 0.4)):
        keeper.save(state_of(step, ROWS), step, value)
    return keeper


def tampered_saves(
    tmp_path: Path, how: str, work: Callable[[FileCheckpointer], str]
) -> Iterator[tuple[Path, int, str]]:
    """Do some work with a saver again and again, each time with another of its calls tampered with.

    Yields:
        The folder, the wait status, its message; for each call until there is no further one.
    """
    for call in CALLS:
        number, tampered_with = 0, True
        while tampered_with:
            number += 1
            folder = tmp_path / f"{call}_{number}"
            keeper, log = saved_twice(folder), tmp_path / f"{call}_{number}.log"
            status, message = forked(lambda keeper=keeper: work(keeper), log, f"{call}:{how}:when={number}")
            text = log.read_text()
            tampered_with = "INJECTED" in text or "killed by" in text
            if tampered_with:
                yield folder, status, message


def see_it_goes_on(folder: Path, steps: tuple[int, ...]) -> int:
    """See that a whole checkpoint of one of these steps is found, and that saves go on from it; return the step."""
    names = [path.name for path in find("auto", folder)]
    assert names == [f"step_{step:08d}.pt" for step in range(len(names), 0, -1)], "no other file is taken for one"
    _, state, warnings = load_first(find("auto", folder))
    step: int = state["cursor"]["step"]
    assert step in steps
    assert warnings == [], "none is damaged"
    expected = load_first(newest_first(reference(folder, step)))[1]
    assert digest(plain(state)) == digest(plain(expected))
    for name in ("best.pt", "last.pt"):
        load(folder / "checkpoints" / name)
    after = checkpointer(folder / "checkpoints")
    after.load_state(state["checkpointer"], step)
    after.save(state_of(4, ROWS), 4, 0.9)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        "last.pt",
        "best.pt",
        *(f"step_{kept:08d}.pt" for kept in (1, step, 4)),
    }
    assert (folder / "checkpoints" / "best.pt").samefile(folder / "checkpoints" / "step_00000001.pt")
    return step


def reference(folder: Path, step: int) -> Path:
    """Return a folder whose newest checkpoint is that of a step, saved without disturbance."""
    there = folder.parent / f"reference_{step}"
    if not there.exists():
        keeper = checkpointer(there)
        for number, value in ((1, 0.1), (2, 0.4), (3, 0.3))[:step]:
            keeper.save(state_of(number, ROWS), number, value)
    return there


@pytest.mark.slow
def test_a_kill_at_any_call_of_a_save_leaves_the_newest_whole_one(tmp_path: Path) -> None:
    def save(keeper: FileCheckpointer) -> str:
        keeper.save(state_of(3, ROWS), 3, 0.3)
        return "saved"

    found = []
    for folder, status, message in tampered_saves(tmp_path, "signal=SIGKILL", save):
        assert os.WIFSIGNALED(status)
        assert (os.WTERMSIG(status), message) == (SIGKILL, "")
        found.append(see_it_goes_on(folder, (2, 3)))
    assert len(found) >= 10
    assert set(found) == {2, 3}


@pytest.mark.slow
def test_an_input_output_error_at_any_call_of_a_save_is_named_and_harms_nothing(tmp_path: Path) -> None:
    def save(keeper: FileCheckpointer) -> str:
        try:
            keeper.save(state_of(3, ROWS), 3, 0.3)
        except RecipeError as error:
            message = str(error)
            keeper.wait(None)
            return message
        return "saved"

    count = 0
    for folder, status, message in tampered_saves(tmp_path, "error=EIO", save):
        path = folder / "checkpoints" / "step_00000003.pt"
        if status == 0:  # else it was the report to this test that failed, after the save
            assert message.startswith(f"{path} could not be written: Input/output error")
            assert ". It needs about 8,4" in message
            assert message.endswith("Earlier checkpoints are untouched.")
        see_it_goes_on(folder, (2, 3))
        count += 1
    assert count >= 10


def test_a_disk_that_takes_nothing_past_the_page_cache_is_written_all_the_same(tmp_path: Path) -> None:
    """Its blocks are of another size, say."""

    def save(keeper: FileCheckpointer) -> str:
        keeper.save(state_of(3, ROWS), 3, 0.3)
        return "saved"

    keeper, log = saved_twice(tmp_path), tmp_path / "strace.log"
    assert forked(lambda: save(keeper), log, "write:error=EINVAL:when=1") == (0, "saved")
    assert "INJECTED" in log.read_text()
    assert see_it_goes_on(tmp_path, (3,)) == 3


# --- in a run of two ranks -------------------------------------------------------------------------------------------

TIMEOUT_S = 3
RUN = [
    "data=random",
    "data.num_samples=400",
    "model=toy",
    "model._target_=own_models.Slow",
    "trainer.max_epochs=100000",
    "checkpoint.every_n_steps=5",
    "checkpoint.save_top_k=-1",
    f"launcher.timeout_s={TIMEOUT_S}",
    "launcher.nproc_per_node=2",
    "hydra.run.dir=run",
]


def until_it_saves(log: Path) -> None:
    """Wait until a process has asked for the sync that strace holds up."""
    until(lambda: log.exists() and "fsync(" in log.read_text(), START_S, "no sync")


@pytest.mark.slow
def test_nobody_times_out_over_a_slow_save_and_a_signal_in_it_ends_the_run_after_it(folder: Path) -> None:
    with started(folder, *RUN) as run:
        until_saved(run, folder / "run")
        slow = f"fsync:delay_enter={2 * TIMEOUT_S}s:when=1"
        with tampered(run.rank(0), folder / "strace.log", slow) as log:
            until_it_saves(log)
            steps = steps_in(folder / "run" / "checkpoints")
            until(lambda: "DELAYED" in log.read_text(), START_S, "it goes on")
            until(lambda: steps_in(folder / "run" / "checkpoints")[-1] > steps[-1] + 5, START_S, "no further save")
        with tampered(run.rank(0), folder / "again.log", slow) as log:
            until_it_saves(log)
            run.signal(SIGTERM)
            run.signal(SIGTERM)
            ended = run.end()
    assert ended.status == 75, ended.err
    assert ended.err.count("Stopped by SIGTERM") == 1
    left = summary(folder / "run")
    assert left["status"] == "preempted"
    newest = newest_first(folder / "run" / "checkpoints")[0]
    assert newest.name == f"step_{left['global_step']:08d}.pt"
    assert load(newest)["cursor"]["step"] == left["global_step"]
    assert not list((folder / "run").rglob("*.part"))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_rank_0_that_is_gone_in_a_save_ends_the_run(folder: Path) -> None:
    words = {
        SIGKILL: "was killed by SIGKILL",
        SIGSTOP: f"Rank 0 of 2 did not respond within launcher.timeout_s={TIMEOUT_S} seconds",
    }
    with ExitStack() as stack:  # they start side by side
        runs = [stack.enter_context(started(folder, *RUN, f"hydra.run.dir=run_{number:d}")) for number in words]
        for (number, expected), run in zip(words.items(), runs, strict=True):
            directory = folder / f"run_{number:d}"
            until_saved(run, directory)
            with tampered(run.rank(0), folder / f"{number:d}.log", "fsync:delay_enter=300s:when=1") as log:
                until_it_saves(log)
                kill(run.rank(0), number)
                if number == SIGSTOP:  # from which strace may wake it up when it lets go, while a kill waits for that
                    run.process.wait(patience(TIMEOUT_S + GONE_S))
            ended = run.end(TIMEOUT_S + GONE_S)
            assert ended.status == 1
            assert expected in ended.err
            state = load_first(newest_first(directory / "checkpoints"))[1]
            assert state["cursor"]["step"] % 5 == 0


# --- with any strategy, on any rank that writes ---------------------------------------------------------------------

STRATEGIES = {
    "fsdp": ["strategy=fsdp", "strategy.shards=4", "strategy.wrap=[net1,net2]"],
    "ddp_exact": ["strategy=ddp_exact", "strategy.shards=4"],
    "ddp_pipeline": ["strategy=ddp_pipeline", "strategy.micro_batches=2"],
}
KILLS = {"write": "write", "sync": "fsync", "rename": "rename,renameat,renameat2"}
IN_A_SAVE = pairwise(
    {
        "strategy": [*STRATEGIES],
        "async_save": ["true", "false"],
        "fault": [*KILLS, "slow", "full"],
        "rank": [0, 1],
        "call": [1, 2, 3],
    },
    seed=13,
)


def disturbed(case: dict[str, Any], folder: Path, own: list[str]) -> None:
    """Run until the save of a rank is cut off, held up or refused by the disk."""
    fault, timeout = case["fault"], timeout_s()
    rank = case["rank"] if case["strategy"] == "fsdp" else 0  # others write nothing
    directory, log = folder / "disk" / "run", folder / "strace.log"
    wide = ["model.hidden_features=500"] if fault == "full" else []
    with started(folder, *own, *wide, f"launcher.timeout_s={timeout}", "hydra.run.dir=disk/run") as run:
        if fault == "full":
            ended = run.end()
            assert re.search(r"could not be written: No space left on device|is not written: it needs about", ended.err)
            assert "Earlier checkpoints are untouched." in ended.err
        elif fault == "slow":
            until_saved(run, directory)
            with tampered(run.rank(rank), log, f"fsync:delay_enter={2 * timeout}s:when={case['call']}"):
                until(lambda: log.exists() and "DELAYED" in log.read_text(), START_S, "no sync")
                held = steps_in(directory / "checkpoints")[-1]
                until(lambda: steps_in(directory / "checkpoints")[-1] > held + 5, START_S, "no further save")
            run.signal(SIGTERM)
            ended = run.end()
        else:
            until_saved(run, directory)
            with tampered(run.rank(rank), log, f"{KILLS[fault]}:signal=SIGKILL:when={case['call']}"):
                ended = run.end()
            assert f"Rank {rank} (" in ended.err
            assert "was killed by SIGKILL" in ended.err
    assert ended.status == (75 if fault == "slow" else 1), ended.err


@pytest.mark.parametrize("number", slow_but([], range(len(IN_A_SAVE)), daily=[0]))
def test_whatever_becomes_of_a_save_the_run_goes_on_to_the_same_bits(number: int, folder: Path) -> None:
    case = IN_A_SAVE[number]
    own = [*RUN, *STRATEGIES[case["strategy"]], f"checkpoint.async_save={case['async_save']}", "optimizer=adamw"]
    with mounted(folder / "disk", "1m" if case["fault"] == "full" else "64m"):
        disturbed(case, folder, own)
        paths = find("auto", folder / "disk" / "run")
        _, state, warnings = load_first(paths)
        assert warnings == [], case
        shutil.copytree(folder / "disk" / "run", folder / "run")
    if case["fault"] == "full":
        return
    steps = f"trainer.max_steps={state['cursor']['step'] + 12}"
    on = [*own, steps, "launcher.timeout_s=60"]
    assert ran(folder, *on, "ckpt_path=auto").status == 0
    assert ran(folder, *on, "hydra.run.dir=whole").status == 0
    assert summary(folder / "run")["weights_sha256"] == summary(folder / "whole")["weights_sha256"], case
    checkpoints, suffix = folder / "run" / "checkpoints", ".json" if case["strategy"] == "fsdp" else ".pt"
    last, best = f"last{suffix}", f"best{suffix}"
    assert load(checkpoints / last)["cursor"]["step"] == state["cursor"]["step"] + 12
    assert {path.name for path in checkpoints.iterdir() if not path.name.startswith("step_")} <= {last, best}
