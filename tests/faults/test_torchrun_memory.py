"""Where torchrun starts all ranks again, they go on from what a process beside them has kept in memory."""

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.patience import patience
from helpers.processes import COLD, ENDLESS, START_S, TORCHRUN, Ended, Run, free_port, ran, started, summary, until

pytestmark = [pytest.mark.spawn, pytest.mark.slow]

PARTS = """
import os
from pathlib import Path
from signal import SIGKILL

from torch import nn

from ddp_recipes import Callback

RANK = int(os.environ["RANK"])


class Dying(Callback):
    \"\"\"Notes each step, and kills a rank after some of them, once each.\"\"\"

    def __init__(self, rank=-1, at=()):
        self.at = at if rank == RANK else ()

    def on_step(self, step):
        with open(f"steps_{RANK}", "a") as file:
            print(step, file=file)
        died = Path(f"died_{step}")
        if step in self.at and not died.exists():
            died.touch()
            os.kill(os.getpid(), SIGKILL)


class Norm(nn.Sequential):
    def __init__(self, in_features, out_features, **unused):
        super().__init__(nn.BatchNorm1d(in_features), nn.Linear(in_features, out_features))
"""
STEPS = 12
RECIPE = [
    "data=random",
    f"data.num_samples={16 * STEPS}",
    "data.val_samples=21",
    "data.global_batch_size=16",
    "model=toy",
    "optimizer.momentum=0.9",
    "trainer.max_epochs=1",
    "trainer.log_every_n_steps=1",
    "trainer.progress=false",
    "launcher.device=cpu",
    "hydra.run.dir=run",
    "+callbacks.dying._target_=parts.Dying",
]
EXACT = "strategy=ddp_exact"
KEPT = "checkpoint.in_memory_every_n_steps=3"
TOLD = r"torchrun started all ranks again\. All started again from memory, at the cost of [\d.]+ s until step (\d+) "


def torchrun(processes: int = 2, *options: str) -> list[str]:
    return [TORCHRUN[0], f"--nproc-per-node={processes}", "--standalone", *(options or ["--max-restarts=3"])]


def run(folder: Path, *overrides: str, command: list[str] | None = None) -> Ended:
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    return ran(folder, *RECIPE, *overrides, command=command or torchrun())


def dying(rank: int, at: str) -> list[str]:
    """Return the overrides with which a rank kills itself after these steps."""
    return [f"+callbacks.dying.rank={rank}", f"+callbacks.dying.at={at}"]


def steps(folder: Path, rank: int) -> list[int]:
    """Return the steps that a rank has done, in all of its lives."""
    return [int(line) for line in (folder / f"steps_{rank}").read_text().splitlines()]


def points(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows, but for what depends on the clock."""
    events = EventAccumulator(str(directory / "tensorboard")).Reload()  # type: ignore[no-untyped-call]
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]  # type: ignore[no-untyped-call]
        for tag in events.Tags()["scalars"]  # type: ignore[no-untyped-call]
        if not tag.endswith("per_second")
    }


def facts(directory: Path) -> dict[str, Any]:
    """Return what a run came to."""
    found = summary(directory)
    metrics = {name: value for name, value in found["metrics"].items() if not name.endswith("per_second")}
    return {name: found[name] for name in ("status", "weights_sha256", "global_step", "samples_seen")} | metrics


def see_same(directory: Path, reference: Path) -> None:
    assert facts(directory) == facts(reference)
    assert points(directory) == points(reference)


@pytest.mark.parametrize(
    ("processes", "rank", "overrides"),
    [
        pytest.param(2, 1, [EXACT], id="ddp_exact"),
        pytest.param(2, 0, ["strategy=ddp", "model._target_=parts.Norm"], id="ddp", marks=pytest.mark.nightly),
        pytest.param(2, 1, ["strategy=fsdp", "model=mlp"], id="fsdp", marks=pytest.mark.nightly),
        pytest.param(1, 0, ["strategy=single"], id="single", marks=pytest.mark.nightly),
    ],
)
def test_they_do_at_most_the_steps_since_then_again(
    processes: int, rank: int, overrides: list[str], tmp_path: Path
) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    assert run(whole, *overrides, command=torchrun(processes)).status == 0
    ended = run(hurt, *overrides, KEPT, *dying(rank, "[8]"), command=torchrun(processes))
    assert ended.status == 0, ended.err
    see_same(hurt / "run", whole / "run")
    assert steps(hurt, rank) == [*range(1, 9), *range(7, STEPS + 1)]
    assert re.findall(TOLD, ended.out + ended.err) == ["7"]
    assert (summary(hurt / "run")["ranks_replaced"], summary(hurt / "run")["seconds_lost"] > 0) == (1, True)


@pytest.mark.nightly
def test_a_checkpoint_that_is_newer_wins_and_each_loss_is_told_once(tmp_path: Path) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    saves = "checkpoint.every_n_steps=4"
    assert run(whole, EXACT, saves).status == 0
    ended = run(hurt, EXACT, saves, KEPT, *dying(0, "[5,9,10,11]"), command=torchrun(2, "--max-restarts=4"))
    assert ended.status == 0, ended.err
    see_same(hurt / "run", whole / "run")
    # From step 4 and step 8, on disk, then twice from step 9, in memory.
    assert steps(hurt, 0) == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 9, 10, 10, 11, 10, 11, 12]
    assert re.findall(TOLD, ended.out + ended.err) == ["10", "10"]
    assert summary(hurt / "run")["ranks_replaced"] == 2


@pytest.mark.nightly
def test_a_job_of_a_sweep_goes_on_from_its_own(tmp_path: Path) -> None:
    sweep = ["hydra.sweep.dir=sweep", "+callbacks.dying.rank=1"]
    ended = run(tmp_path, "-m", EXACT, KEPT, *sweep, "+callbacks.dying.at=[1],[8]", "seed=7")
    assert ended.status == 0, ended.err
    assert re.findall(TOLD, ended.out + ended.err) == ["7"]
    assert facts(tmp_path / "sweep" / "1") == facts(tmp_path / "sweep" / "0")  # which began anew: nothing was kept


def keepers(run: Run) -> list[int]:
    """Return the processes that hold memory."""
    command = b"ddp_recipes.recovery.snapshot_holder"
    return [pid for pid in run.pids() if command in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_holds_the_memory_ends_with_torchrun(number: signal.Signals, folder: Path) -> None:
    with started(folder, *ENDLESS, KEPT, "logger=none", command=[*COLD, *torchrun()]) as endless:
        until((folder / "run" / "checkpoints" / "last.pt").exists, START_S, "no checkpoint")
        (keeper,) = keepers(endless)
        assert os.getsid(keeper) != os.getsid(endless.rank(0))
        endless.signal(number)
        endless.process.wait(patience(START_S))
        endless.see_all_gone()


def test_without_a_folder_of_torchruns_a_warning_says_that_nothing_is_kept(tmp_path: Path) -> None:
    ended = run(tmp_path, KEPT, command=torchrun(2, "--max-restarts=1", "--log-dir=/dev/null"))
    assert ended.status == 0, ended.err
    assert (ended.out + ended.err).count(f"{KEPT}: no state is kept in memory. torchrun keeps no logs") == 1


def test_torchrun_without_restarts_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path, KEPT, command=torchrun(1, "--max-restarts=0"))
    assert ended.status == 1
    assert f"{KEPT} keeps a state for ranks that are started again, and none would be" in ended.err
    assert "torchrun --max-restarts" in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_parts_of_a_model_on_several_nodes_are_refused(tmp_path: Path) -> None:
    address = ["--nnodes=2", "--max-restarts=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    own = ["strategy=fsdp", KEPT, "data=random", "model=mlp", "launcher.device=cpu", "hydra.run.dir=run"]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                started(tmp_path, *own, command=[TORCHRUN[0], *address, f"--node-rank={rank}", "--nproc-per-node=1"])
            )
            for rank in (0, 1)
        ]
        ended = [node.end() for node in nodes]
    assert [each.status for each in ended] == [1, 1]
    assert f"{KEPT}: torchrun may start ranks on other nodes" in ended[0].err
    assert not (tmp_path / "run").exists()
