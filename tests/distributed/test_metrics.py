"""Metrics of a task: collections, confusion matrices as pictures, and those of training batches."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each

Run = Callable[..., Summary]

IMAGES = [
    "data=fake_images",
    "data.image_size=4",
    "data.in_channels=1",
    "data.num_samples=46",
    "data.val_samples=21",
    "data.global_batch_size=12",
    "model=mlp",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
]
OF = "torchmetrics.classification.Multiclass"
F1 = f"{{_target_: {OF}F1Score, num_classes: 10}}"
HITS = f"{{_target_: {OF}Accuracy, num_classes: 10, average: micro}}"
SCORES = f"+task.metrics.scores={{_target_: torchmetrics.MetricCollection, metrics: {{f1: {F1}, hits: {HITS}}}}}"
CONFUSION = f"+task.metrics.confusion={{_target_: {OF}ConfusionMatrix, num_classes: 10}}"


def column(folder: Path, name: str) -> list[tuple[int, float]]:
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row[name]]


def pictures(folder: Path, tag: str) -> list[int]:
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0}).Reload()
    return [event.step for event in board.Images(tag)]


@pytest.fixture(autouse=True)
def loaded() -> None:
    """Import once here, not in each forked rank."""
    pytest.importorskip("matplotlib.figure", reason="matrices are drawn with matplotlib: the extra peers")
    import torchmetrics.classification  # noqa: F401


@pytest.mark.slow
def test_collection_and_matrix_are_exact_at_any_number_of_ranks(run: Run, tmp_path: Path) -> None:
    overrides = [
        *IMAGES,
        SCORES,
        CONFUSION,
        "logger=[csv,tensorboard]",
        "task.train_metrics=true",
        "strategy=ddp_exact",
    ]
    found = {}
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        found[world_size] = run(*overrides, world_size=world_size, directory=folder)["metrics"]
        assert {name for name in found[1] if name.startswith("val/")} == {
            "val/loss",
            "val/accuracy",
            "val/f1",
            "val/hits",
        }
        steps = [step for step, _ in column(folder, "train/accuracy")]
        assert steps == list(range(1, 9))
        assert pictures(folder, "val/confusion") == [4, 8]
        assert (folder / "csv" / "val" / "confusion.png").read_bytes().startswith(b"\x89PNG")
    for name in ("val/accuracy", "val/f1", "val/hits", "train/accuracy", "train/f1", "train/hits"):
        assert column(tmp_path / "1", name) == column(tmp_path / "2", name), name
    for name in ("train", "val"):
        counted, summed = column(tmp_path / "2", f"{name}/accuracy"), column(tmp_path / "2", f"{name}/hits")
        assert [value for _, value in counted] == pytest.approx([value for _, value in summed], rel=1e-6)
    # Of 12 samples a step, and 10 at the end of an epoch.
    hits = [value * (10 if step % 4 == 0 else 12) for step, value in column(tmp_path / "2", "train/accuracy")]
    assert hits == pytest.approx([round(each) for each in hits])


@pytest.mark.slow
def test_train_metrics_change_nothing_else(run: Run, tmp_path: Path) -> None:
    overrides = [*IMAGES, "trainer.accumulate_grad_batches=2", "logger=csv", "trainer.log_every_n_steps=2"]
    without = run(*overrides, world_size=2, directory=tmp_path / "without")
    measured = run(*overrides, "task.train_metrics=true", world_size=2, directory=tmp_path / "with")
    assert measured["weights_sha256"] == without["weights_sha256"]
    assert measured["metrics"].keys() - without["metrics"].keys() == {"train/accuracy"}
    assert column(tmp_path / "with", "train/loss") == column(tmp_path / "without", "train/loss")
    assert [step for step, _ in column(tmp_path / "with", "train/accuracy")] == [2, 4]


def test_train_metric_is_what_the_model_gave_for_the_batch(run: Run, tmp_path: Path) -> None:
    """Of one batch without randomness the metric is that of the model before the step: as validated before it."""
    whole = ["data.global_batch_size=46", "trainer.max_epochs=1", "optimizer.lr=0", "task.train_metrics=true"]
    same = "data.val={_target_: ddp_recipes.datasets.fake_images, num_samples: 46, image_size: 4, in_channels: 1,"
    same += " num_classes: 10, seed: 42, split: train}"
    metrics = run(*IMAGES, *whole, same, world_size=2)["metrics"]
    assert metrics["train/accuracy"] == pytest.approx(metrics["val/accuracy"])
    assert metrics["train/loss"] == pytest.approx(metrics["val/loss"], rel=1e-6)


@pytest.mark.slow
def test_mode_validate_draws_the_matrix(run: Run, tmp_path: Path) -> None:
    last = run(*IMAGES, CONFUSION, "trainer.max_epochs=1")["last_checkpoint"]
    folder = tmp_path / "validated"
    run(*IMAGES, CONFUSION, "mode=validate", f"ckpt_path={last}", "logger=csv", directory=folder, world_size=2)
    assert (folder / "csv" / "val" / "confusion.png").is_file()


REFUSED = {
    "a value a class": f"+task.metrics.each={{_target_: {OF}Accuracy, num_classes: 10, average: none}}",
    "a curve": f"+task.metrics.each={{_target_: {OF}ROC, num_classes: 10, thresholds: 5}}",
    "one name twice": "+task.metrics.one={_target_: torchmetrics.MetricCollection, metrics: {accuracy: {_target_: "
    f"{OF}Accuracy, num_classes: 10}}}}}}",
    "the loss": "+task.metrics.loss={_target_: ddp_recipes.tasks.Accuracy}",
    "no number": "+task.metrics.none={_target_: own_parts.no_number, _partial_: true}",
    "a monitor that is drawn": "checkpoint.monitor=val/confusion",
}
MESSAGES = {
    "a value a class": "task.metrics.each computes a tensor [10]",
    "a curve": "task.metrics.each computes a tuple",
    "one name twice": "called accuracy",
    "the loss": "called loss",
    "no number": "The metric none is a NoneType. Return a tensor with a value for each sample",
    "a monitor that is drawn": "checkpoint.monitor=val/confusion",
}


@pytest.mark.parametrize("case", REFUSED)
def test_metric_that_cannot_be_logged_is_refused(case: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        run(*IMAGES, CONFUSION, REFUSED[case], "checkpoint.mode=max", directory=tmp_path / "run")
    assert MESSAGES[case] in str(refused.value)
    assert not list(tmp_path.glob("run/*"))


FORMS = ("off", "off_in_all", "off_as_number", "off_one_by_one")


@pytest.mark.parametrize(("strategy", "ranks"), quick_each(2, [("ddp", 2), ("ddp_exact", 2), ("ddp_pipeline", 2)]))
def test_a_metric_in_any_form_is_the_mean_over_samples(strategy: str, ranks: int, run: Run) -> None:
    measured = [f"+task.metrics.{name}={{_target_: own_parts.{name}, _partial_: true}}" for name in FORMS]
    cut = ["data.global_batch_size=13", "data.val_batch_size=2", f"task.train_metrics={strategy != 'ddp_pipeline'}"]
    found = run(*cut, *measured, f"strategy={strategy}", world_size=ranks)["metrics"]
    for split in {name.partition("/")[0] for name in found if name.endswith("/mae")}:
        assert [found[f"{split}/{name}"] for name in FORMS] == pytest.approx([found[f"{split}/mae"]] * len(FORMS))


def test_train_metrics_are_refused_where_nothing_measures(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not go with strategy=ddp_pipeline"):
        run(*IMAGES, "strategy=ddp_pipeline", "task.train_metrics=true", world_size=2, directory=tmp_path / "pipeline")
    with pytest.raises(RunFailed, match=r"Silent\.training_step does not measure"):
        run(*IMAGES, "task._target_=trackers_parts.Silent", "task.train_metrics=true", directory=tmp_path / "own")


def test_picture_of_a_matrix_is_a_png() -> None:
    from ddp_recipes.reporting.figures.matrix import draw_matrix

    for size in (2, 30):
        assert draw_matrix(torch.eye(size).tolist(), "val/confusion").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("strategy", "ranks"), quick_each(3, [("ddp", 3), ("ddp_exact", 3), ("ddp_pipeline", 2)]), ids=str
)
def test_a_metric_that_keeps_lists_is_that_of_all_samples(strategy: str, ranks: int, run: Run) -> None:
    """Of fewer samples than ranks, and of a pipeline, whose last stage alone has outputs."""
    kept = "{_target_: metric_parts.Kept}"
    collected = f"{{_target_: torchmetrics.MetricCollection, metrics: {{again: {kept}}}}}"
    listed = [*IMAGES, "data.val_samples=2", "logger=none", f"+task.metrics.kept={kept}"]
    listed += [f"+task.metrics.more={collected}"]
    alone = run(*listed, "strategy=single")["metrics"]
    together = run(*listed, f"strategy={strategy}", world_size=ranks)["metrics"]
    for name in ("val/kept", "val/again"):
        assert together[name] == alone[name] >= 2


@pytest.mark.parametrize(
    ("strategy", "ranks"), quick_each(1, [("ddp", 3), ("ddp_exact", 3), ("ddp_pipeline", 2)]), ids=str
)
def test_a_metric_whose_state_takes_its_form_from_what_it_sees_is_that_of_all_samples(
    strategy: str, ranks: int, run: Run
) -> None:
    """One number until then, and one of each output after it, in 64 bits: not all ranks see a sample."""
    measured = ["data.val_samples=2", "data.global_batch_size=12", "+task.metrics.r2._target_=torchmetrics.R2Score"]
    measured += ["+task.metrics.wide._target_=metric_parts.Wide"]
    alone = run(*measured, "strategy=single")["metrics"]
    together = run(*measured, f"strategy={strategy}", world_size=ranks)["metrics"]
    for name in ("val/r2", "val/wide"):
        assert together[name] == pytest.approx(alone[name])
