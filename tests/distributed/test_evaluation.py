"""Evaluation counts every sample once, on any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but

Run = Callable[..., Summary]

IMAGES = [
    "data=fake_images",
    "data.image_size=4",
    "data.in_channels=1",
    "data.num_samples=32",
    "data.val_batch_size=4",
    "model=mlp",
    "optimizer.lr=0.1",
    "trainer.max_epochs=4",
]
F1 = (
    "+task.metrics.f1={_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 10, average: macro}",
    "+task.metrics.hits={_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 10, average: micro}",
)


@pytest.fixture
def trained(run: Run) -> str:
    """The checkpoint of a classifier that is right sometimes."""
    summary = run(*IMAGES, "data.val_samples=40")
    assert 0.1 < summary["metrics"]["val/accuracy"] < 1
    return str(summary["last_checkpoint"])


@pytest.mark.slow
@pytest.mark.parametrize("samples", slow_but([1], [21, 1]))
def test_metrics_do_not_depend_on_the_number_of_ranks(samples: int, trained: str, run: Run) -> None:
    import torchmetrics.classification  # noqa: F401  # once here, not in each forked rank

    overrides = [*IMAGES, *F1, f"data.val_samples={samples}", "mode=validate", f"ckpt_path={trained}"]
    one = run(*overrides)["metrics"]
    assert set(one) == {"val/loss", "val/accuracy", "val/f1", "val/hits"}
    assert one["val/accuracy"] * samples == pytest.approx(round(one["val/accuracy"] * samples), abs=1e-12)
    for world_size in (2, 3):
        several = run(*overrides, world_size=world_size)["metrics"]
        assert several["val/accuracy"] == one["val/accuracy"]
        assert several == pytest.approx(one, rel=1e-6)
    assert one["val/hits"] == pytest.approx(one["val/accuracy"], rel=1e-6), "two ways to count the same"


@pytest.mark.slow
def test_the_batch_size_does_not_matter(trained: str, run: Run) -> None:
    overrides = [*IMAGES, "data.val_samples=21", "mode=validate", f"ckpt_path={trained}"]
    found = [run(*overrides, f"data.val_batch_size={size}")["metrics"] for size in (1, 5, 256)]
    assert {metrics["val/accuracy"] for metrics in found} == {found[0]["val/accuracy"]}
    assert all(metrics == pytest.approx(found[0], rel=1e-6) for metrics in found)


def test_overfitting_is_validated_within_an_epoch_of_data_workers(run: Run) -> None:
    overfit = ["data.train._target_=own_parts.OneByOne", "trainer.overfit_batches=4", "trainer.val_check_interval=2"]
    alone, with_workers = (run(*overfit, f"data.num_workers={workers}") for workers in (0, 1))
    assert with_workers["weights_sha256"] == alone["weights_sha256"]
    assert with_workers["metrics"]["val/loss"] == alone["metrics"]["val/loss"]


def test_samples_count_alike_in_batches_without_a_row_for_each(run: Run) -> None:
    sets = ["data.train._target_=own_parts.Sets", "data.val._target_=own_parts.Sets", "data.val.num_samples=21"]
    sets += ["data.collate_fn=own_parts.ragged", "model._target_=own_parts.OfSets", "task=model_loss", "mode=validate"]
    ways = ((21, 1), (4, 1), (4, 2))
    whole, *others = (run(*sets, f"data.val_batch_size={n}", world_size=ranks)["metrics"] for n, ranks in ways)
    assert all(each == pytest.approx(whole, rel=1e-6) for each in others)


@pytest.mark.parametrize("world_size", [1, 2])
def test_test_measures_its_own_split(world_size: int, trained: str, run: Run) -> None:
    test = "data.test={_target_: ddp_recipes.datasets.fake_images, num_samples: 30, image_size: 4, in_channels: 1,"
    test += " num_classes: 10, seed: 42, split: test}"
    summary = run(*IMAGES, test, "mode=test", f"ckpt_path={trained}", world_size=world_size)
    assert set(summary["metrics"]) == {"test/loss", "test/accuracy"}
    assert summary["status"] == "finished"
    assert summary["mode"] == "test"
    assert summary["metrics"]["test/accuracy"] * 30 == pytest.approx(round(summary["metrics"]["test/accuracy"] * 30))


def test_limits_cut_evaluation_off(trained: str, run: Run) -> None:
    overrides = [*IMAGES, "mode=validate", f"ckpt_path={trained}"]
    few = run(*overrides, "data.val_samples=40", "trainer.limit_val_batches=3")["metrics"]
    assert few == pytest.approx(run(*overrides, "data.val_samples=40", "trainer.limit_val_batches=0.3")["metrics"])
    assert few["val/accuracy"] * 12 == pytest.approx(round(few["val/accuracy"] * 12))


def test_predictions_are_in_the_order_of_the_data(trained: str, run: Run) -> None:
    import ddp_recipes.datasets as datasets
    from ddp_recipes.checkpointing.reading import load
    from ddp_recipes.models import MLP

    def predicted(world_size: int, *overrides: str) -> torch.Tensor:
        summary = run(
            *IMAGES,
            "data.val_samples=21",
            "mode=predict",
            f"ckpt_path={trained}",
            *overrides,
            world_size=world_size,
        )
        found = torch.load(Path(summary["run_directory"]) / "predictions.pt", weights_only=True)
        assert isinstance(found, torch.Tensor)
        return found

    model = MLP(16, (64, 32), 10)
    model.load_state_dict(load(Path(trained))["model"])
    inputs, _ = datasets.fake_images(21, 4, 1, 10, 42, "val").fetch(torch.arange(21))
    with torch.no_grad():
        expected = model(inputs)
    for world_size, overrides in [(1, []), (2, []), (2, ["data.shard=strided"]), (3, ["data.val_batch_size=10"])]:
        found = predicted(world_size, *overrides)
        assert found.shape == (21, 10)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mode", "file"), [("predict", "predictions.pt"), ("export", "model.safetensors")])
def test_a_run_for_a_file_says_where_it_is(
    mode: str, file: str, trained: str, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path(run(*IMAGES, f"mode={mode}", f"ckpt_path={trained}", "logger=tensorboard")["run_directory"]) / file
    printed = capfd.readouterr().out
    assert path.is_file()
    assert ["written", str(path)] in [line.split() for line in printed.splitlines()]
    assert "see it with" not in printed


def test_all_ranks_evaluate_one_model(run: Run) -> None:
    """Each rank's batch norm follows its own batches: what is measured is what rank 0 saves."""
    norm = ["model._target_=own_parts.Norm", "data.val_samples=21", "optimizer.lr=0.01"]
    trained = run(*norm, world_size=2)
    alone = run(*norm, "mode=validate", f"ckpt_path={trained['last_checkpoint']}")
    assert trained["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-6)
    together = run(*norm, "mode=validate", f"ckpt_path={trained['last_checkpoint']}", world_size=2)
    assert together["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-6)


@pytest.mark.slow
def test_validation_comes_when_it_is_due(run: Run, notes: Callable[[], list[dict[str, Any]]], noting: str) -> None:
    def validations(*overrides: str) -> list[list[int]]:
        run("data.global_batch_size=8", "trainer.max_epochs=4", noting, *overrides, world_size=2)
        return [note["validations"] for note in notes()]

    assert validations() == [[8, 16, 24, 32]] * 2
    assert validations("trainer.check_val_every_n_epoch=2") == [[16, 32]] * 2
    assert validations("trainer.val_check_interval=0.5", "trainer.max_epochs=2") == [[4, 8, 12, 16]] * 2
    assert validations("trainer.val_check_interval=3", "trainer.max_epochs=2") == [[3, 6, 11, 14]] * 2
    assert validations("data.val=null") == [[]] * 2


@pytest.mark.parametrize(
    ("own", "counts"), [("whole=false", (0, 16)), ("whole=true", (16, 16)), ("by=train", (0, 16))], ids=str
)
def test_parts_that_are_in_eval_mode_stay_so(
    own: str, counts: tuple[int, int], run: Run, weights: Callable[[Summary], dict[str, Any]]
) -> None:
    """But a model that is in eval mode as a whole, as it comes from Hugging Face, is put in training mode."""
    norms = ["model._target_=own_parts.Norms", f"+model.{own}", "trainer.val_check_interval=0.5"]
    found = weights(run(*norms))
    assert (found["frozen.num_batches_tracked"], found["norm.num_batches_tracked"]) == counts
