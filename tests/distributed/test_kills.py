"""A kill or a signal wherever a step can be cut in two, then go on: the run ends as if it had never been disturbed."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_recipes.checkpointing.files import newest_first
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import Preempted, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but

Run = Callable[..., Summary]

# 8 steps an epoch, a checkpoint every 3 steps and none at the epoch's end, all that a resume must take up.
RUN = [
    "data.num_samples=61",
    "data.global_batch_size=8",
    "data.train._target_=own_parts.OneByOne",
    "model._target_=own_parts.Dropout",
    "optimizer=adamw",
    "scheduler=cosine",
    "scheduler._target_=own_parts.KilledCosine",
    "~scheduler.eta_min",
    "+scheduler.kill_at=null",
    "+scheduler.rank=0",
    "trainer.precision=16-mixed",
    "trainer.max_epochs=4",
    "trainer.log_every_n_steps=1",
    "callbacks=early_stopping",
    "callbacks.early_stopping.patience=100",
    "checkpoint.every_n_steps=3",
    "checkpoint.save_top_k=2",
    "checkpoint.monitor=train/loss",
    "logger=tensorboard",
]
NOT_TIMED = ("train/loss", "train/lr", "train/grad_norm", "train/epoch", "val/loss", "val/mae")

# Where it is killed: (the step, the checkpoint that is there then).
POINTS = {
    "step": (14, 12),
    "validation": (16, 15),
    "validated": (16, 15),
    "saved": (18, 18),
    "before the schedule": (20, 18),
    "before any checkpoint": (2, None),
}


def left(folder: Path) -> dict[str, Any]:
    """Return what a run left that must not depend on how often it was killed."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    checkpoints = {path.name: load(path) for path in (folder / "checkpoints").iterdir()}
    return {
        "points": {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in NOT_TIMED},
        "checkpoints": {
            name: [state[part] for part in ("cursor", "scheduler", "precision", "callbacks", "checkpointer")]
            for name, state in checkpoints.items()
        },
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Summary, dict[str, Any]]]:
    """What runs of each world size came to, once they have been needed."""
    return {}


@pytest.mark.parametrize(
    ("point", "world_size", "rank"),
    slow_but(
        [("saved", 1, 0)],
        [
            *((point, 1, 0) for point in POINTS),
            ("step", 2, 0),
            ("validation", 2, 1),
            ("saved", 2, 0),
            ("before the schedule", 2, 1),
        ],
        daily=[("validation", 2, 1), ("saved", 2, 0), ("before the schedule", 2, 1)],
    ),
)
def test_a_killed_run_goes_on_to_what_an_undisturbed_one_leaves(
    point: str,
    world_size: int,
    rank: int,
    run: Run,
    tmp_path: Path,
    undisturbed: dict[int, tuple[Summary, dict[str, Any]]],
) -> None:
    if world_size not in undisturbed:
        whole = run(*RUN, "ckpt_path=auto", directory=tmp_path / "whole", world_size=world_size)
        undisturbed[world_size] = whole, left(tmp_path / "whole")
    step, saved = POINTS[point]
    folder = tmp_path / "killed"
    if point == "before the schedule":
        kill = [f"scheduler.kill_at={step}", f"scheduler.rank={rank}"]
    else:
        where = "step" if saved is None else point
        kill = [f"+callbacks.killed={{_target_: own_parts.Signalled, where: {where}, step: {step}, rank: {rank}}}"]
    with pytest.raises((RuntimeError, RunFailed)):
        run(*RUN, *kill, "logger.flush_secs=0", "ckpt_path=auto", directory=folder, world_size=world_size)
    there = sorted((folder / "checkpoints").glob("step_*.pt"))
    assert [path.name for path in there[-1:]] == ([] if saved is None else [f"step_{saved:08d}.pt"])
    tear(folder / "tensorboard")
    resumed = run(*RUN, "data.num_workers=2", "ckpt_path=auto", directory=folder, world_size=world_size)
    whole, expected = undisturbed[world_size]
    for name in ("weights_sha256", "global_step", "epoch", "samples_seen"):
        assert resumed[name] == whole[name]
    assert resumed["metrics"]["val/loss"] == whole["metrics"]["val/loss"]
    assert [step for step, _ in expected["points"]["train/loss"]] == list(range(1, 33))
    assert left(folder) == expected


def tear(folder: Path) -> None:
    """End the event file with the first part of a record, as a kill in the midst of a write does."""
    (path,) = folder.iterdir()
    with path.open("r+b") as file:
        start = file.read(20)
        file.seek(0, os.SEEK_END)
        file.write(start)


@pytest.mark.slow
def test_the_points_of_a_killed_run_are_those_that_it_logged(run: Run) -> None:
    """Otherwise the comparison above would compare nothing."""
    summary = run(*RUN)
    points = left(Path(summary["run_directory"]))["points"]
    assert all(math.isfinite(value) for tag in NOT_TIMED for _, value in points[tag])
    assert len(points["val/loss"]) == 4


SIGNALLED = ["data.num_samples=61", "data.global_batch_size=8", "trainer.max_epochs=400", "optimizer.lr=0.001"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "rank", "times"),
    slow_but([("step", 0, 2)], [("step", 0, 2), ("validation", 1, 1), ("validation", 0, 2), ("saving", 1, 2)]),
)
def test_a_signal_anywhere_ends_with_one_checkpoint_at_one_step_and_goes_on(
    where: str, rank: int, times: int, run: Run, tmp_path: Path
) -> None:
    """To one rank alone, once or twice; validation and the saves are at each epoch's end, of 8 steps."""
    what = f"_target_: own_parts.Signalled, where: {where}, step: 16, rank: {rank}, name: SIGTERM, times: {times}"
    which = "SIGTERM" if rank == 0 else "SIGTERM to another rank"
    with pytest.raises(Preempted, match=rf"Stopped by {which} at step \d+, after a checkpoint was saved") as stopped:
        run(*SIGNALLED, f"+callbacks.signalled={{{what}}}", "ckpt_path=auto", directory=tmp_path, world_size=2)
    newest = newest_first(tmp_path / "checkpoints")[0]
    step = load(newest)["cursor"]["step"]
    assert f"at step {step}," in str(stopped.value)
    assert 16 <= step < 3200, "within the second or so in which ranks exchange what they know"
    assert newest.samefile(tmp_path / "checkpoints" / "last.pt")
    assert not list(tmp_path.rglob("*.part"))
    rest = [f"trainer.max_steps={step + 5}", "ckpt_path=auto"]
    resumed = run(*SIGNALLED, *rest, directory=tmp_path, world_size=2)
    assert resumed["weights_sha256"] == run(*SIGNALLED, rest[0], world_size=2)["weights_sha256"]
