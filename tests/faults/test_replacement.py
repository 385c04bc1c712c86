"""A rank that is lost is replaced while the others keep their processes, and nobody can tell from what comes out."""

import csv
import json
import os
import re
import subprocess
import time
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_recipes.checkpointing.files import named, newest_first, step_files
from ddp_recipes.checkpointing.reading import load_first
from helpers.checkpoints import broken_disk
from helpers.patience import patience
from helpers.processes import COLD, ENDLESS, GONE_S, START_S, TWO, kill, started, until, until_saved

PARTS = """
import os
import time
from pathlib import Path
from signal import SIGKILL, SIGSTOP

from torch import nn, ones

from ddp_recipes import Callback


class Disturbing(Callback):
    def __init__(self, rank, at, how, once=True, where="on_step"):
        self.at, self.how, self.once = at, how, once
        if rank == int(os.environ["RANK"]):
            setattr(self, where, self.disturb)

    def disturb(self, number):
        done = Path(f"done_{number}")
        if number not in self.at or (self.once and done.exists()):
            return
        done.touch()
        if self.how == "raise":
            raise ValueError("the cat sat on the keyboard")
        os.kill(os.getpid(), SIGSTOP if self.how == "stop" else SIGKILL)


class Counting(Callback):
    def __init__(self):
        self.saves, self.folder = {}, Path("saves")

    def on_save_start(self, step):
        self.saves[step] = "begun"


class Preparing(Counting):
    def state(self):
        return {"saves": len(self.saves)}


class Averaging(Counting):
    def on_step(self, step):
        self.averages = [each.detach().clone() for each in self.run.task.parameters()]


class Stopping(Callback):
    def on_step(self, step):
        self.stop = step == 7


class StoppedAtEnd(Callback):
    def on_end(self):
        if os.environ["RANK"] == "0" and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), SIGSTOP)


class SetBack(Callback):
    def on_step(self, step):
        if step == 3:
            date = time.time
            time.time = lambda: date() - 3600


class HeldIfNew(nn.Linear):
    def __init__(self, in_features, out_features, **unused):
        super().__init__(in_features, out_features)
        if Path("done_5").exists():
            Path("held").touch()
            while not Path("attacked").exists():
                time.sleep(0.01)


class DiesHandingOver(nn.Linear):
    def __init__(self, in_features, out_features, **unused):
        super().__init__(in_features, out_features)

    def state_dict(self, *args, **names):
        if os.environ["RANK"] == "0" and Path("done_5").exists() and not Path("again").exists():
            Path("again").touch()
            os.kill(os.getpid(), SIGKILL)
        return super().state_dict(*args, **names)


class Norm(nn.Sequential):
    def __init__(self, in_features, out_features, **unused):
        super().__init__(nn.BatchNorm1d(in_features), nn.Linear(in_features, out_features))


class Grows:
    def __init__(self, **unused):
        self.count = 64 + Path("done_5").exists()

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return ones(10), ones(5)


class Logs(nn.Linear):
    def __init__(self, in_features, out_features, **unused):
        super().__init__(in_features, out_features)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("of_all", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("score", self(batch[0]).mean())
"""
RECIPE = [
    "data=random",
    "data.num_samples=64",
    "data.val_samples=21",
    "data.global_batch_size=16",
    "optimizer.momentum=0.9",
    "trainer.max_epochs=3",
    "trainer.log_every_n_steps=1",
    "trainer.progress=false",
    "checkpoint.every_n_steps=4",
    "launcher.device=cpu",
    "launcher.nproc_per_node=2",
    "hydra.run.dir=run",
]
EXACT = "strategy=ddp_exact"
NORM = ["strategy=ddp", "model._target_=parts.Norm"]
LOGS = ["strategy=ddp", "model._target_=parts.Logs", "task=lightning"]  # without a loss of validation to monitor
STEPS = 12


def ran(python: str, folder: Path, *overrides: str, **environ: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text(PARTS)
    return subprocess.run(
        [python, "-m", "ddp_recipes", *RECIPE, *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "", **environ},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )


def disturbed(rank: int, at: str, how: str = "kill", *others: str) -> list[str]:
    """Return the overrides with which a rank does something to itself after these steps."""
    values = f"{{_target_: parts.Disturbing, rank: {rank}, at: {at}, how: {how}}}"
    return [f"+callbacks.disturbing={values}", "launcher.replace_ranks=3", *others]


def summary(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return values


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows, but for what depends on the clock."""
    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()  # type: ignore[no-untyped-call]
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]  # type: ignore[no-untyped-call]
        for tag in events.Tags()["scalars"]  # type: ignore[no-untyped-call]
        if not tag.endswith("per_second")
    }


def see_same(folder: Path, reference: Path) -> None:
    """Fail unless a run came to what the undisturbed one did, with each point once."""
    for name in ("weights_sha256", "global_step", "epoch", "samples_seen", "metrics"):
        ours, theirs = summary(folder)[name], summary(reference)[name]
        if name == "metrics":
            ours, theirs = (
                {key: value for key, value in each.items() if "second" not in key} for each in (ours, theirs)
            )
        assert ours == theirs, name
    assert points(folder) == points(reference)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    """The folder of a run to which nothing was done."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = ran(python, folder, EXACT)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize(
    ("rank", "how", "cause"),
    [
        (0, "kill", "was killed by SIGKILL"),
        pytest.param(1, "kill", "was killed by SIGKILL", marks=pytest.mark.slow),
        (1, "raise", "failed: ValueError: the cat sat on the keyboard"),
        pytest.param(1, "stop", "did not respond and was killed", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_replaced_and_the_run_ends_as_if_undisturbed(
    rank: int, how: str, cause: str, tmp_path: Path, undisturbed: Path, python: str
) -> None:
    timeout = ["launcher.timeout_s=5"] if how == "stop" else []
    ended = ran(python, tmp_path, EXACT, *timeout, *disturbed(rank, "[5]", how))
    assert ended.returncode == 0, ended.stderr
    see_same(tmp_path, undisturbed)
    (told,) = (line for line in (ended.stdout + ended.stderr).splitlines() if "Replaced, at the cost of" in line)
    assert told.startswith(f"Rank {rank} ")
    assert cause in told
    assert "start again" not in ended.stderr
    assert summary(tmp_path)["ranks_replaced"] == 1
    assert 0 < summary(tmp_path)["seconds_lost"] < summary(tmp_path)["wall_time_s"]
    trace = tmp_path / "run" / "ranks" / f"rank_{rank}.txt"
    if how == "raise":
        assert "in disturb" in ended.stderr  # its traceback
        assert "in disturb" in trace.read_text()
    if how == "stop":
        assert "training/loop.py" in trace.read_text()  # where it was stopped, or an instant later: it was continued


@pytest.mark.slow
def test_a_date_that_is_set_before_a_rank_is_lost_moves_neither_the_end_nor_the_time_of_the_run(
    tmp_path: Path, undisturbed: Path, python: str
) -> None:
    limit = ["+callbacks.set._target_=parts.SetBack", "trainer.max_time=1800"]
    ended = ran(python, tmp_path, EXACT, *limit, *disturbed(0, "[5]"))
    assert ended.returncode == 0, ended.stderr
    see_same(tmp_path, undisturbed)
    assert 0 < summary(tmp_path)["seconds_lost"] < summary(tmp_path)["wall_time_s"] < 1800


@pytest.mark.slow
def test_ranks_are_replaced_one_after_the_other_also_at_the_last_step(
    tmp_path: Path, undisturbed: Path, python: str
) -> None:
    ended = ran(python, tmp_path, EXACT, *disturbed(1, f"[3,8,{STEPS}]"))
    assert ended.returncode == 0, ended.stderr
    see_same(tmp_path, undisturbed)
    assert summary(tmp_path)["ranks_replaced"] == 3
    assert (ended.stdout + ended.stderr).count("Replaced, at the cost of") == 3


KEY = {"DDP_RECIPES_KEY": "a secret that these nodes have"}
LAUNCHERS = ["local", pytest.param("nodes", marks=pytest.mark.nightly)]


def launched_by(launcher: str, folder: Path) -> list[str]:
    """Return what chooses a launcher; of nodes there is one."""
    met = [f"launcher.rdzv_endpoint=file://{folder}/meet", "launcher.local_addr=127.0.0.1"]
    return [f"launcher={launcher}", *(met if launcher == "nodes" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exception_that_comes_again_at_its_step_ends_the_run(launcher: str, tmp_path: Path, python: str) -> None:
    again = ["+callbacks.disturbing.once=false", "+callbacks.disturbing.where=on_epoch_start"]
    own = [*disturbed(1, "[1]", "raise", *again), *launched_by(launcher, tmp_path)]
    ended = ran(python, tmp_path, EXACT, *own, **KEY)
    assert ended.returncode == 1
    assert "ValueError: the cat sat on the keyboard" in ended.stderr
    assert "in disturb" in ended.stderr
    assert summary(tmp_path)["status"] == "failed", ended.stderr
    assert "the cat sat on the keyboard" in summary(tmp_path)["error"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_hang_that_comes_a_third_time_at_its_step_ends_the_run(tmp_path: Path, python: str) -> None:
    again = ["+callbacks.disturbing.once=false", "+callbacks.disturbing.where=on_epoch_start", "launcher.timeout_s=3"]
    ended = ran(python, tmp_path, EXACT, *disturbed(1, "[1]", "stop", *again), "launcher.replace_ranks=100")
    assert ended.returncode == 1
    assert ended.stderr.count("Rank 1 did not respond and was killed. It was being replaced when:") == 2, ended.stderr
    assert "3 times at step 4, so nobody is replaced again: Rank 1 did not respond" in ended.stderr
    assert "Rank 1 did not respond" in summary(tmp_path)["error"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_more_losses_than_may_be_replaced_end_the_run(launcher: str, tmp_path: Path, python: str) -> None:
    own = [*launched_by(launcher, tmp_path), "launcher.replace_ranks=1"]
    ended = ran(python, tmp_path, EXACT, *disturbed(1, "[3,8]"), *own, **KEY)
    assert ended.returncode == 1
    assert len({*re.findall(r"(\d+)\) was killed by SIGKILL", ended.stderr)}) == 2, ended.stderr
    assert summary(tmp_path)["status"] == "failed"
    assert "Rank 1" in summary(tmp_path)["error"]


@pytest.mark.slow
def test_once_all_that_may_be_are_replaced_a_restart_that_fails_blames_no_other_rank(
    tmp_path: Path, python: str
) -> None:
    """The others wait for the launcher's word, and get it."""
    again = ["+callbacks.disturbing.once=false", "+callbacks.disturbing.where=on_epoch_start"]
    spent = ["launcher.replace_ranks=1", "launcher.max_restarts=1"]
    ended = ran(python, tmp_path, EXACT, *disturbed(1, "[1]", "raise", *again), *spent)
    assert ended.returncode == 1
    assert "Restart 1 of 1, from the last checkpoint." in ended.stderr
    assert "did not respond" not in ended.stderr
    assert summary(tmp_path)["error"] == "rank 1: ValueError: the cat sat on the keyboard"


@pytest.mark.slow
def test_a_new_rank_that_finds_other_data_than_the_rest_have_ends_the_run(tmp_path: Path, python: str) -> None:
    ended = ran(python, tmp_path, "data.train._target_=parts.Grows", *disturbed(1, "[5]"))
    assert ended.returncode == 2, ended.stderr
    assert "samples of data.train: 64 on rank 0, 65 on rank 1" in ended.stderr
    found = summary(tmp_path)
    assert (found["status"], found["global_step"]) == ("failed", 5)
    assert "samples of data.train" in found["error"]


BOTH = "logger=[tensorboard,csv]"


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_where_all_start_again_from_step_0_each_point_is_there_once(
    lost: int, tmp_path: Path, undisturbed: Path, python: str
) -> None:
    again = ["launcher.replace_ranks=0", "launcher.max_restarts=1"]
    ended = ran(python, tmp_path, EXACT, BOTH, *disturbed(lost, "[3]"), *again)  # before the first checkpoint
    assert ended.returncode == 0, ended.stderr
    assert "Restart 1 of 1, from step 0." in ended.stderr
    see_same(tmp_path, undisturbed)
    with (tmp_path / "run" / "csv" / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [*range(1, STEPS + 1)]


@pytest.mark.slow
def test_ranks_replaced_are_counted_over_later_starts(tmp_path: Path, undisturbed: Path, python: str) -> None:
    """One is replaced, then all start again: from step 0, or from a checkpoint; then a later command goes on."""
    for first, second in ((2, 3), (5, 9)):
        folder = tmp_path / str(first)
        restarts = ["launcher.replace_ranks=1", "launcher.max_restarts=1"]
        ended = ran(python, folder, EXACT, *disturbed(1, f"[{first},{second}]"), *restarts)
        assert ended.returncode == 0, ended.stderr
        assert "Restart 1 of 1, from " in ended.stderr
        see_same(folder, undisturbed)
        assert summary(folder)["ranks_replaced"] == 1
        seconds = summary(folder)["seconds_lost"]
        assert seconds > 0
    ended = ran(python, folder, EXACT, "ckpt_path=auto", "trainer.max_epochs=4")
    assert ended.returncode == 0, ended.stderr
    assert (summary(folder)["ranks_replaced"], summary(folder)["seconds_lost"]) == (1, seconds)


@pytest.mark.slow
def test_a_rank_that_is_lost_once_callbacks_have_ended_the_run_makes_it_no_longer(tmp_path: Path, python: str) -> None:
    early = ["callbacks=early_stopping", "callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=9"]
    for number, (stops, step) in enumerate([(early, 8), (["+callbacks.own={_target_: parts.Stopping}"], 7)]):
        reference, folder = tmp_path / f"reference_{number}", tmp_path / f"{number}"
        lost = disturbed(1, f"[{step}]")
        if stops is early:
            lost[0] = lost[0].replace("}", ", where: on_validation_end}")
        for where, others in ((reference, []), (folder, lost)):
            ended = ran(python, where, EXACT, "launcher.timeout_s=20", *stops, *others)
            assert ended.returncode == 0, ended.stderr
        see_same(folder, reference)
        assert summary(folder)["global_step"] == step
        assert summary(folder)["ranks_replaced"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("how", "replaced"), [("Counting", 1), ("Preparing", 0), ("Averaging", 0)])
def test_a_callback_that_prepares_a_save_with_tensors_or_state_alone_keeps_ranks_from_being_replaced(
    how: str, replaced: int, tmp_path: Path, undisturbed: Path, python: str
) -> None:
    ended = ran(python, tmp_path, EXACT, f"+callbacks.own={{_target_: parts.{how}}}", *disturbed(1, "[6]"))
    assert ended.returncode == 0, ended.stderr
    see_same(tmp_path, undisturbed)
    assert summary(tmp_path)["ranks_replaced"] == replaced
    said = "callbacks.own may put other weights in the model's place for a save" in ended.stdout + ended.stderr
    assert said == (how == "Preparing")  # as training begins, the other one has no tensors yet


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize(("launcher", "before"), [("local", False), ("local", True), ("nodes", False)])
@pytest.mark.parametrize("asked", [SIGTERM, pytest.param(SIGINT, marks=pytest.mark.nightly)])
def test_a_run_that_is_to_stop_while_a_rank_is_replaced_is_saved(
    asked: Signals, launcher: str, before: bool, folder: Path
) -> None:
    """Also where the other rank has taken a lost one's place before."""
    (folder / "parts.py").write_text(PARTS)
    held = ["model._target_=parts.HeldIfNew", *disturbed(1, "[5]"), *launched_by(launcher, folder)]
    held += ["+callbacks.before={_target_: parts.Disturbing, rank: 0, at: [3], how: kill}"] * before
    with started(folder, *RECIPE, EXACT, *held, "trainer.max_epochs=100000", environ=KEY) as run:
        until(lambda: (folder / "held").exists() or run.process.poll() is not None, START_S, "nobody is replaced")
        run.signal(asked)
        (folder / "attacked").touch()
        ended = run.end()
    assert ended.status == 75, ended.err
    assert summary(folder)["status"] == "preempted"
    assert summary(folder)["global_step"] in step_files(folder / "run" / "checkpoints")


@pytest.mark.slow
def test_a_new_rank_that_fails_of_another_one_as_it_takes_its_state_is_no_loss_of_its_own(
    tmp_path: Path, python: str
) -> None:
    """Three ranks: the second is lost, then the first one, as it hands over its state."""
    own = [EXACT, "model._target_=parts.DiesHandingOver", "checkpoint=none", "launcher.nproc_per_node=3"]
    ended = ran(python, tmp_path, *own, *disturbed(1, "[5]"))
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^Rank (\d) .*Replaced", ended.stderr, re.MULTILINE) == ["1", "0"]
    assert summary(tmp_path)["ranks_replaced"] == 2


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_rank_that_is_stopped_as_all_come_to_their_end_is_waited_for_once(folder: Path) -> None:
    """Those that have waited for it in vain say so, and are lost, too: nobody is left to notice that."""
    (folder / "parts.py").write_text(PARTS)
    limit, own = 15, ["+callbacks.own._target_=parts.StoppedAtEnd", "launcher.replace_ranks=3"]
    with started(folder, *RECIPE, EXACT, *own, f"launcher.timeout_s={limit}") as run:
        until(lambda: (folder / "stopped").exists(), START_S, "it does not come to its end")
        began, said = time.monotonic(), folder / f"{run.mark}.err"
        until(lambda: "Rank 0 did not respond and was killed." in said.read_text(), 2 * limit, "nobody misses it")
        assert time.monotonic() - began < 2 * limit  # for the others, and then for the launcher
        ended = run.end()
    assert ended.status == 0, ended.err
    assert "all start again, from the last checkpoint" in ended.err


@pytest.mark.slow
@pytest.mark.spawn
def test_a_disk_that_is_full_while_a_rank_is_replaced_is_named(folder: Path) -> None:
    (folder / "parts.py").write_text(PARTS)
    own = ["model._target_=parts.HeldIfNew", *disturbed(1, "[5]"), "logger=none", "hydra.run.dir=disk/run"]
    with (
        broken_disk(folder / "disk", "full") as fail,
        started(folder, *RECIPE, EXACT, *own, "trainer.max_epochs=100000") as run,
    ):
        until(lambda: (folder / "held").exists() or run.process.poll() is not None, START_S, "nobody is replaced")
        fail()
        (folder / "attacked").touch()
        ended = run.end()
        _, _, damaged = load_first(newest_first(folder / "disk" / "run" / "checkpoints"))
    assert ended.status == 1
    assert "could not be written: No space left on device" in ended.err.splitlines()[-1]
    assert damaged == []  # the newest one is whole


@pytest.mark.slow
@pytest.mark.spawn
def test_a_signal_while_all_ranks_start_again_leaves_a_run_to_go_on_with(folder: Path) -> None:
    (folder / "parts.py").write_text(PARTS)
    held = ["model._target_=parts.HeldIfNew", *disturbed(1, "[5]"), "launcher.replace_ranks=0"]
    with started(folder, *RECIPE, EXACT, *held, "launcher.max_restarts=1", "trainer.max_epochs=100000") as run:
        until(lambda: (folder / "held").exists() or run.process.poll() is not None, START_S, "nobody starts again")
        run.signal(SIGTERM)
        ended = run.end()
    assert ended.status == 75, ended.err
    assert ended.err.splitlines()[-1].startswith("Stopped by SIGTERM before it went on from step 4, where its newest ")
    assert summary(folder)["status"] == "preempted"


@pytest.mark.slow
@pytest.mark.spawn
def test_a_rank_that_is_lost_while_the_fork_server_is_stopped_does_not_hold_up_the_run(folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, "launcher.replace_ranks=2", command=COLD) as run:
        until_saved(run, folder / "run")
        kill(run.fork_server, SIGSTOP)
        kill(run.rank(1), SIGKILL)
        again = "all start again, from the last checkpoint"
        until(lambda: again in (folder / f"{run.mark}.err").read_text(), GONE_S, "it does not go on")
        last = named(folder / "run" / "checkpoints", "last")
        saved = last.stat().st_mtime_ns
        until(lambda: last.stat().st_mtime_ns > saved, START_S, "it trains no more")
        run.signal(SIGTERM)
        ended = run.end()
    assert ended.status == 75, ended.err
    assert "The process that ranks are forked from did not respond and was killed" in ended.err
    assert "It was being replaced when" not in ended.err  # nobody is started for ranks that are all gone


@pytest.mark.slow
@pytest.mark.spawn
def test_a_replacement_leaves_no_file_open_in_the_launcher(folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, EXACT, "launcher.replace_ranks=2") as run:
        until_saved(run, folder / "run")
        open_files, log = [], folder / "run" / "train.log"
        for number in (1, 2):
            kill(run.rank(1), SIGKILL)
            until(lambda number=number: log.read_text().count("Replaced, at") == number, START_S, "it is not replaced")  # type: ignore[misc]
            open_files.append(len(os.listdir(f"/proc/{run.pid}/fd")))
        assert open_files[0] == open_files[1]
        run.signal(SIGTERM)
        assert run.end().status == 75


@pytest.mark.slow
def test_where_rank_0_alone_had_what_is_saved_all_start_again(tmp_path: Path, python: str) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    assert ran(python, whole, *NORM).returncode == 0
    ended = ran(python, hurt, *NORM, *disturbed(0, "[5]"))
    assert ended.returncode == 0, ended.stderr
    assert "Rank 0" in ended.stderr
    assert "No rank has all that the lost one had: all start again, from the last checkpoint." in ended.stderr
    see_same(hurt, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param([EXACT, "launcher.replace_ranks=0", "launcher.max_restarts=1"], id="ddp_exact"),
        pytest.param([*NORM, "launcher.replace_ranks=1"], id="ddp", marks=pytest.mark.slow),
        pytest.param([*LOGS, "launcher.replace_ranks=1"], id="lightning", marks=pytest.mark.slow),
        pytest.param(
            ["strategy=fsdp", "launcher.replace_ranks=0", "launcher.max_restarts=1"], id="fsdp", marks=pytest.mark.slow
        ),
        pytest.param(
            ["strategy=single", "launcher.nproc_per_node=1", "launcher.max_restarts=1"],
            id="single",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_where_all_start_again_they_go_on_from_what_is_in_memory(
    strategy: list[str], tmp_path: Path, python: str
) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    unsaved = ["checkpoint.every_n_steps=4", "checkpoint.in_memory_every_n_steps=3"]
    assert ran(python, whole, *strategy).returncode == 0
    ended = ran(python, hurt, *disturbed(0, "[8]"), *strategy, *unsaved)
    assert ended.returncode == 0, ended.stderr
    assert "from step 6, which is in memory." in ended.stderr
    assert "All started again from memory, at the cost of" in ended.stdout + ended.stderr
    see_same(hurt, whole)
    assert summary(hurt)["ranks_replaced"] == 1


@pytest.mark.slow
def test_a_state_in_memory_that_nobody_would_read_is_refused(tmp_path: Path, python: str) -> None:
    ended = ran(python, tmp_path, EXACT, "checkpoint.in_memory_every_n_steps=3")
    assert ended.returncode == 2
    assert "checkpoint.in_memory_every_n_steps=3" in ended.stderr
    assert "launcher.replace_ranks" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [["strategy=ddp"], pytest.param([EXACT, "strategy.shards=4"], marks=pytest.mark.slow)],
    ids=["ddp", "ddp_exact"],
)
def test_statistics_of_batch_norm_outlive_a_loss_after_a_step(strategy: list[str], tmp_path: Path, python: str) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    assert ran(python, whole, *NORM, *strategy).returncode == 0
    ended = ran(python, hurt, *NORM, *strategy, *disturbed(1, "[4]"))  # before the validation of an epoch
    assert ended.returncode == 0, ended.stderr
    assert summary(hurt)["ranks_replaced"] == 1
    see_same(hurt, whole)


@pytest.mark.parametrize("overrides", [["launcher=slurm"], ["launcher=env"], []], ids=["slurm", "env", "auto"])
def test_ranks_that_somebody_else_starts_are_not_replaced(overrides: list[str], tmp_path: Path, python: str) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29718"}
    environ = {} if "launcher=slurm" in overrides else started
    ended = ran(python, tmp_path, *overrides, "launcher.nproc_per_node=1", "launcher.replace_ranks=2", **environ)
    assert ended.returncode == 2
    assert "launcher.replace_ranks=2" in ended.stderr
