"""Going on from a checkpoint is as if the run had never stopped: the same bits."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Store

from ddp_recipes import rank
from ddp_recipes.checkpointing.files import newest_first
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks
from helpers.marks import quick_each, slow_but
from helpers.recipes import QUICK

Run = Callable[..., Summary]

SAVING = ["data.num_samples=61", "trainer.max_epochs=3", "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
MODELS = Path(__file__).parent

DRAWING = [
    "model._target_=own_parts.Drawing",
    "data.collate_fn=own_parts.mixed",
    "data.train._target_=own_parts.OneByOne",
    "data.val._target_=own_parts.OneByOne",
]
TRAINING = {
    "sgd with momentum": [],
    "adamw, cosine": ["optimizer=adamw", "scheduler=cosine"],
    "one_cycle": ["scheduler=one_cycle"],
    "warmup_cosine": ["scheduler=warmup_cosine", "scheduler.milestones=[5]"],
    "an optimizer's own state": ["~optimizer", "+optimizer={_target_: own_parts.Remembering, _partial_: true}"],
    "an optimizer's own state, in stages": [
        *("strategy=ddp_pipeline", "~optimizer", "+optimizer={_target_: own_parts.Remembering, _partial_: true}"),
    ],
    "rates by a metric": [
        "~scheduler",
        "+scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, patience: 0, threshold: 9}",
    ],
    "rates of NumPy": ["~scheduler", "+scheduler={_target_: own_parts.NumpyCosine, _partial_: true, steps: 40}"],
    "what a module saves beside tensors": ["model._target_=own_parts.SavedAnnealed"],
    "buffers whose shapes come with the first pass": ["model._target_=own_parts.Quantized"],
    "dropout": ["model._target_=own_parts.Dropout"],
    "dropout, accumulation, clipping": [
        "model._target_=own_parts.Dropout",
        "trainer.accumulate_grad_batches=2",
        "trainer.gradient_clip_val=0.1",
    ],
    "batch norm": ["model._target_=own_parts.Norm"],
    "16-mixed": ["trainer.precision=16-mixed"],
    "bf16-true, adamw": ["trainer.precision=bf16-true", "optimizer=adamw"],
    "64-true, batch norm": ["trainer.precision=64-true", "model._target_=own_parts.Norm"],
    "async_save": ["checkpoint.async_save=true"],
    "sample by sample": ["model._target_=own_parts.Dropout", "data.train._target_=own_parts.OneByOne"],
    "workers": ["model._target_=own_parts.Dropout", "data.train._target_=own_parts.OneByOne", "data.num_workers=2"],
    "numpy and random in the model and the collate function": DRAWING,
    "numpy and random in the model from the third step on": ["model._target_=own_parts.DrawingLate"],
    "numpy, random, workers": [*DRAWING, "data.num_workers=2"],
    "all together": [
        "model._target_=own_parts.Dropout",
        "data.train._target_=own_parts.OneByOne",
        "data.num_workers=2",
        "optimizer=adamw",
        "scheduler=cosine",
        "trainer.accumulate_grad_batches=2",
        "trainer.val_check_interval=3",
    ],
}


def stops(checkpoints: Path) -> Iterator[Path]:
    """Yield checkpoints of the middle and of the end of an epoch."""
    files = sorted(checkpoints.glob("step_*.pt"))
    cursors = {path: load(path)["cursor"] for path in files}
    yield next(path for path in files if cursors[path]["batch"] > 0)
    yield next(path for path in files if cursors[path]["batch"] == 0)


@pytest.mark.parametrize(
    ("name", "world_size"),
    slow_but(
        [
            ("dropout, accumulation, clipping", 2),
            ("numpy and random in the model from the third step on", 1),
        ],
        [
            *((name, size) for name in TRAINING for size in (1, 2) if size == 2 or "stages" not in name),
            ("all together", 3),
            ("batch norm", 3),
        ],
        daily=[
            ("numpy, random, workers", 2),
            ("16-mixed", 2),
            ("batch norm", 3),
            ("all together", 3),
            ("rates by a metric", 2),
            ("what a module saves beside tensors", 2),
            ("buffers whose shapes come with the first pass", 2),
            ("an optimizer's own state", 1),
            ("an optimizer's own state, in stages", 2),
        ],
    ),
)
def test_a_resumed_run_ends_with_the_same_bits(name: str, world_size: int, run: Run) -> None:
    whole = run(*SAVING, *TRAINING[name], world_size=world_size)
    for path in stops(Path(whole["run_directory"]) / "checkpoints"):
        resumed = run(*SAVING, *TRAINING[name], f"ckpt_path={path}", world_size=world_size)
        assert resumed["weights_sha256"] == whole["weights_sha256"], path.name
        for number in ("global_step", "epoch", "samples_seen"):
            assert resumed[number] == whole[number]
        assert resumed["metrics"]["val/loss"] == whole["metrics"]["val/loss"]


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2]))
def test_a_stopped_run_goes_on_in_its_directory(world_size: int, run: Run, tmp_path: Path) -> None:
    overrides = ["data.num_samples=61", "model._target_=own_parts.Dropout", "optimizer=adamw", "trainer.max_epochs=3"]
    whole = run(*overrides, world_size=world_size)
    folder = tmp_path / "stopped"
    first = run(*overrides, "trainer.max_steps=3", "ckpt_path=auto", directory=folder, world_size=world_size)
    assert first["global_step"] == 3
    second = run(*overrides, "ckpt_path=auto", directory=folder, world_size=world_size)
    assert second["weights_sha256"] == whole["weights_sha256"]
    assert second["samples_seen"] == whole["samples_seen"] == 3 * 61
    nothing_left = run(*overrides, "ckpt_path=auto", directory=folder, world_size=world_size)
    assert nothing_left["weights_sha256"] == whole["weights_sha256"]
    assert nothing_left["global_step"] == whole["global_step"]


@pytest.mark.slow
def test_early_stopping_goes_on_counting(run: Run, tmp_path: Path) -> None:
    stopping = ["callbacks=early_stopping", "callbacks.early_stopping.patience=4", "optimizer.lr=0"]
    overrides = [*stopping, "data.batch_size=16", "trainer.max_epochs=20"]
    assert run(*overrides)["epoch"] == 5
    folder = tmp_path / "stopped"
    run(*overrides, "trainer.max_epochs=3", directory=folder)
    for _ in range(2):  # once more it has nothing left to do
        assert run(*overrides, "ckpt_path=auto", directory=folder)["epoch"] == 5
    patient = run(*overrides, "callbacks.early_stopping.patience=6", "ckpt_path=auto", directory=folder)
    assert patient["epoch"] == 7


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("val/loss", "val/mae"), ("val/mae", "val/loss")])
def test_what_was_the_best_of_another_metric_does_not_count(first: str, then: str, run: Run, tmp_path: Path) -> None:
    overrides = ["callbacks=early_stopping", "optimizer.lr=0", "data.batch_size=16", "trainer.max_epochs=20"]
    monitor = "callbacks.early_stopping.monitor"
    run(*overrides, f"{monitor}={first}", "trainer.max_epochs=3", directory=tmp_path / "run")
    assert run(*overrides, f"{monitor}={then}", "ckpt_path=auto", directory=tmp_path / "run")["epoch"] == 3 + 1 + 3


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["seed=7"], "seed=7, where that was 42"),
        (["data.shuffle=false"], "other data, or another order"),
        ([], ""),
    ],
)
def test_an_epoch_that_goes_on_in_another_order_is_warned_of(overrides: list[str], why: str, run: Run) -> None:
    for steps, told in ((11, bool(why)), (8, False)):  # in the midst of the second epoch, and as it begins
        path = run(f"trainer.max_steps={steps}")["last_checkpoint"]
        log = (Path(run(f"ckpt_path={path}", *overrides)["run_directory"]) / "train.log").read_text()
        assert ("whose samples come in another order in this run" in log) == told
        assert why in log or not told


def test_the_newest_checkpoint_is_there_though_another_one_is_better(run: Run) -> None:
    summary = run("checkpoint.save_last=false", "trainer.max_steps=11")
    assert newest_first(Path(summary["run_directory"]) / "checkpoints")[0].name == "step_00000011.pt"


@pytest.mark.slow
def test_another_directory_can_be_named(run: Run) -> None:
    first = run("trainer.max_epochs=1")
    folder, checkpoints = Path(first["run_directory"]), Path(first["run_directory"]) / "checkpoints"
    expected = run()["weights_sha256"]
    for name in (folder, checkpoints, checkpoints / "last.pt", checkpoints / "best.pt"):
        assert run(f"ckpt_path={name}")["weights_sha256"] == expected


@pytest.mark.slow
def test_what_does_not_go_on_is_refused_and_nothing_is_written(run: Run, tmp_path: Path) -> None:
    first = run("trainer.max_epochs=1", world_size=2)
    path, folder = first["last_checkpoint"], tmp_path / "refused"

    def refused(*overrides: str, directory: Path = folder, world_size: int = 1) -> str:
        with pytest.raises(RequestError) as refusal:
            run(*overrides, directory=directory, world_size=world_size)
        return str(refusal.value)

    assert "was trained with a global batch of 16 samples, this run has 8" in refused(f"ckpt_path={path}")
    other = refused(f"ckpt_path={path}", "model.hidden_features=12", world_size=2)
    assert "is a checkpoint of another model" in other
    assert "net1.weight: [10, 10] in the checkpoint, [12, 10] in the model" in other
    assert "there is no" in refused("ckpt_path=nowhere.pt")
    assert "has no checkpoint" in refused("ckpt_path=last")
    assert not folder.exists()
    used = Path(first["run_directory"])
    before = {file: file.stat().st_mtime_ns for file in used.rglob("*")}
    assert "already holds a run" in refused(directory=used, world_size=2)
    assert {file: file.stat().st_mtime_ns for file in used.rglob("*")} == before
    assert run(f"ckpt_path={path}", "data.global_batch_size=16")["global_step"] == 8


def test_a_damaged_file_that_was_named_is_refused(run: Run, tmp_path: Path) -> None:
    path = Path(run()["last_checkpoint"])
    copy = tmp_path / "copy.pt"
    shutil.copy(path, copy)
    damage(copy)
    with pytest.raises(RequestError, match=r"copy\.pt is damaged or no checkpoint"):
        run(f"ckpt_path={copy}")


def damage(path: Path) -> None:
    """Flip a bit in the midst of the first tensor, where it is, so that other names of the file are of the same."""
    weights = next(iter(load(path)["model"].values())).numpy().tobytes()
    place = path.read_bytes().index(weights)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([weights[0] ^ 1]))


@pytest.mark.parametrize("world_size", slow_but([1], [1, 2]))
def test_a_damaged_newest_one_is_passed_over_loudly_and_does_not_come_back(
    world_size: int, run: Run, tmp_path: Path
) -> None:
    overrides = ["data.num_samples=61", "data.global_batch_size=8", "checkpoint.every_n_steps=3"]
    whole = run(*overrides, world_size=world_size)
    folder, checkpoints = tmp_path / "hurt", tmp_path / "hurt" / "checkpoints"
    run(*overrides, "trainer.max_steps=9", directory=folder, world_size=world_size)
    bad = checkpoints / "step_00000009.pt"
    damage(bad)
    measured = run("mode=validate", f"ckpt_path={folder}", world_size=world_size)
    why = "its content does not match its checksum (archive/data/0)"
    words = f"{bad} is damaged: {why}. {checkpoints / 'step_00000006.pt'} is used instead."
    for directory, level in ((folder, 0), (Path(measured["run_directory"]), 1)):
        assert (directory / "train.log").read_text().count(words) == level
    for name in ("last", "auto"):
        copy = tmp_path / name
        shutil.copytree(folder, copy, copy_function=os.link)
        resumed = run(*overrides, f"ckpt_path={name}", directory=copy, world_size=world_size)
        assert resumed["weights_sha256"] == whole["weights_sha256"]
        assert words.replace(str(folder), str(copy)) in (copy / "train.log").read_text()
    resumed = run(*overrides, "trainer.max_steps=8", "ckpt_path=auto", directory=folder, world_size=world_size)
    assert resumed["global_step"] == 8
    assert load(Path(resumed["last_checkpoint"]))["cursor"]["step"] == 8
    assert (checkpoints / "step_00000009.pt.aside").exists()
    assert newest_first(checkpoints)[0].name == "step_00000008.pt"
    again = run(*overrides, "ckpt_path=auto", directory=folder, world_size=world_size)
    assert again["weights_sha256"] == whole["weights_sha256"]


def test_when_all_are_damaged_the_run_is_refused_and_nothing_is_changed(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "hurt"
    run("checkpoint.every_n_steps=3", directory=folder)
    for path in newest_first(folder / "checkpoints"):
        damage(path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(RequestError, match=r"Every checkpoint in .* is damaged") as refusal:
        run("checkpoint.every_n_steps=3", "ckpt_path=auto", directory=folder, world_size=2)
    assert [path.name in str(refusal.value) for path in newest_first(folder / "checkpoints")] == [True] * 2
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_going_back_to_an_earlier_one_leaves_the_later_ones_aside(run: Run, tmp_path: Path) -> None:
    overrides = ["data.global_batch_size=8", "checkpoint.every_n_steps=4", "checkpoint.save_top_k=-1"]
    whole = run(*overrides, directory=tmp_path)
    back = tmp_path / "checkpoints" / "step_00000008.pt"
    run(*overrides, f"ckpt_path={back}", "trainer.max_steps=9", directory=tmp_path)
    names = [path.name for path in newest_first(tmp_path / "checkpoints")]
    assert names == [f"step_{step:08d}.pt" for step in (9, 8, 4)]
    assert len(list((tmp_path / "checkpoints").glob("*.aside"))) == 2
    assert run(*overrides, "ckpt_path=auto", directory=tmp_path)["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_ranks_that_would_go_on_from_different_checkpoints_are_refused(tmp_path: Path, run: Run) -> None:
    path = Path(run("trainer.max_epochs=1", "data.global_batch_size=8")["last_checkpoint"])

    def prepare(world: World, store: Store | None) -> str:
        (tmp_path / str(world.rank)).mkdir()
        if world.rank == 0:  # as on nodes that share no disk
            shutil.copytree(path.parent, tmp_path / "0" / "checkpoints")
        job = make_job([*QUICK, "ckpt_path=auto", "data.global_batch_size=8"], tmp_path / str(world.rank))
        with pytest.raises(RequestError) as refusal:
            rank.prepare(job, world, Control(world, Messages(store), 20))
        return str(refusal.value)

    said = on_ranks(prepare, 2)
    assert said[0] == said[1]
    assert "checkpoint: step 8, " in said[0]
    assert "on rank 0, none on rank 1" in said[0]
    assert "one run directory" in said[0]


# --- resume.strict ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "at", "again", "seen"),
    slow_but([(16, 2, 8, 69)], [(4, 10, 0, 61), (6, 6, 4, 65), (16, 2, 8, 69), (61, 0, 40, 101)]),
)
def test_another_global_batch_goes_on_when_it_is_asked_for(
    batch: int, at: int, again: int, seen: int, run: Run, tmp_path: Path
) -> None:
    """From step 5 of 8 samples: no sample of the epoch is left out, and as few as can be are seen twice."""
    overrides = ["data.num_samples=61", "trainer.max_epochs=1"]
    path = run(*overrides, "data.global_batch_size=8", "trainer.max_steps=5")["last_checkpoint"]
    other = [*overrides, f"data.global_batch_size={batch}", f"ckpt_path={path}"]
    with pytest.raises(RequestError, match=r"resume\.strict=false"):
        run(*other)
    for world_size in (1, 2):
        summary = run(*other, "resume.strict=false", world_size=world_size)
        assert summary["samples_seen"] == seen
        assert summary["global_step"] == 5 + -(-61 // batch) - at
        log = (Path(summary["run_directory"]) / "train.log").read_text()
        assert f"goes on at batch {at} of {batch} samples: {again} are seen twice, none is left out" in log


def test_fewer_batches_an_epoch_than_are_done_are_refused(run: Run) -> None:
    path = run("data.global_batch_size=8", "trainer.max_steps=5")["last_checkpoint"]
    shorter = ["data.global_batch_size=8", "trainer.limit_train_batches=3", f"ckpt_path={path}"]
    with pytest.raises(RequestError, match="from after batch 5 of an epoch, this run has 3 batches an epoch"):
        run(*shorter)
    assert run(*shorter, "trainer.max_epochs=1", "resume.strict=false")["global_step"] == 6


def test_a_set_that_has_grown_is_refused_in_the_middle_of_an_epoch(run: Run) -> None:
    size, grown = ("data.global_batch_size=8", "trainer.max_epochs=2"), "data.num_samples=75"
    path = run(*size, "data.num_samples=61", "trainer.max_steps=5")["last_checkpoint"]
    with pytest.raises(RequestError, match=r"after batch 5 of an epoch of 61 samples, this run has 75: .* the data as"):
        run(*size, grown, f"ckpt_path={path}")
    summary = run(*size, grown, f"ckpt_path={path}", "resume.strict=false")
    assert summary["global_step"] == 20
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert "goes on at batch 5 of 8 samples: there are 75 in another order, and were 61" in log
    ended = run(*size, "data.num_samples=61", "trainer.max_epochs=1")["last_checkpoint"]
    assert run(*size, grown, f"ckpt_path={ended}")["global_step"] == 8 + 10


def test_checkpoints_hold_plain_data(run: Run) -> None:
    state: dict[str, Any] = load(Path(run(world_size=2)["last_checkpoint"]))
    assert set(state["model"]) == {"net1.weight", "net1.bias", "net2.weight", "net2.bias"}, "names without wrappers"
    assert state["cursor"] == {"epoch": 2, "batch": 0, "step": 8, "samples_seen": 128}
    assert (state["world_size"], state["global_batch_size"], state["seed"]) == (2, 16, 42)


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    quick_each(3, [(["fsdp", "strategy.wrap=[net1,net2]"], 2), (["ddp_exact"], 2), (["single"], 1)]),
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_run_that_resumes_holds_no_more_than_one_that_does_not(
    strategy: list[str], world_size: int, run: Run, tmp_path: Path
) -> None:
    """What it has read of the checkpoint is in the model and its optimizer, and nowhere else."""
    common = [
        "strategy=" + strategy[0],
        *strategy[1:],
        "optimizer=adamw",
        "model.hidden_features=3000",
        "trainer.max_epochs=3",
    ]
    common += ["+callbacks.held._target_=own_parts.Held", f"+callbacks.held.folder={tmp_path}"]

    def held(*overrides: str) -> list[int]:
        run(*common, *overrides, world_size=world_size, directory=tmp_path / "run")
        return [int((tmp_path / str(rank)).read_text()) for rank in range(world_size)]

    fresh = held("trainer.max_epochs=1")
    resumed = held("ckpt_path=auto")
    assert min(fresh) > 4 * 15 * 3000 * 3 / world_size
    assert max(after - before for after, before in zip(resumed, fresh, strict=True)) < 4 * 5 * 3000 / world_size
