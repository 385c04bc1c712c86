"""``check=equivalence`` is silent where a strategy is right, and names step and tensor where it is not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.tools.equivalence import TOLERANCE
from helpers.marks import slow_but

Run = Callable[..., Summary]

CHECK = ["check=equivalence", "data.num_samples=61"]
EXACT = ["strategy=ddp_exact", "data.batch_size=2"]


def found(run: Run, folder: Path, *overrides: str, world_size: int = 2) -> str:
    """Return the message of a check that fails."""
    with pytest.raises(RunFailed) as failure:
        run(*CHECK, *overrides, world_size=world_size, directory=folder)
    return str(failure.value)


RIGHT = [
    (["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1", "optimizer=adamw"], 3),
    (["model=toy_mp", "data.train._target_=own_parts.OneByOne", "data.num_workers=1"], 2),
    (["trainer.precision=bf16-mixed"], 2),
    (["trainer.precision=16-mixed", "trainer.gradient_clip_val=0.1"], 2),
    (["trainer.precision=bf16-true"], 2),
    (["trainer.precision=64-true", "strategy=fsdp", "strategy.wrap=[net1,net2]", "trainer.gradient_clip_val=0.1"], 2),
    ([*EXACT, "model._target_=own_parts.Spare", "optimizer.weight_decay=0.1"], 2),
    (["strategy=single"], 1),
    (["strategy=ddp", "+strategy.comm_hook=bf16"], 2),
]


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    slow_but([RIGHT[4]], RIGHT),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_right_passes(overrides: list[str], world_size: int, run: Run) -> None:
    summary = run(*CHECK, *overrides, world_size=world_size)
    assert summary["status"] == "finished"
    assert set(summary["metrics"]) == {"check/gradient", "check/parameter", "check/buffer"}
    usual = "bf16-mixed" if "+strategy.comm_hook=bf16" in overrides else "32-true"
    name = next((one.partition("=")[2] for one in overrides if "precision" in one), usual)
    assert all(value < TOLERANCE[name] for value in summary["metrics"].values())


def test_it_is_a_run_that_leaves_no_checkpoint(run: Run) -> None:
    folder = Path(run(*CHECK, "model._target_=own_parts.Dropout", world_size=2)["run_directory"])
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "train.log", "summary.json"}
    log = (folder / "train.log").read_text()
    assert "Dropout is off for the check, in 1: its masks differ from rank to rank." in log
    assert "strategy=ddp does what strategy=single does: 8 steps, check_tolerance 1e-05." in log


def test_a_wrong_loss_scale_is_named(run: Run, tmp_path: Path) -> None:
    message = found(run, tmp_path, "task._target_=exact_parts.ScaledTwice")
    assert "strategy=ddp does not do what strategy=single does. The first difference is at step 1, on rank 0" in message
    assert "All gradients are 0.5 times those of one process: is a loss scaled twice, or not at all?" in message
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["metrics"]["check/gradient"] > 0.1


def test_one_wrong_gradient_is_named(run: Run, tmp_path: Path) -> None:
    message = found(run, tmp_path, "model._target_=exact_parts.HeadScaled", world_size=3)
    assert "the gradient net2.bias is off by" in message
    assert "It is 3 times that of one process." in message


def test_a_forgotten_buffer_is_named(run: Run, tmp_path: Path) -> None:
    message = found(run, tmp_path, "model._target_=exact_parts.Forgotten")
    assert "at step 1, on rank 1: the buffer latest is off by" in message
    assert "Does each rank change it by its own samples?" in message


def test_batch_norm_of_each_replica_is_a_difference(run: Run, tmp_path: Path) -> None:
    message = found(run, tmp_path, "data.num_samples=64", "model._target_=own_parts.Norm")
    assert "the gradient 0.weight is off by" in message
    assert "The model has batch norm (1): each replica takes its statistics from its own samples." in message


@pytest.mark.slow
def test_a_difference_that_comes_later_is_found_at_its_step(run: Run, tmp_path: Path) -> None:
    poisoned = ["model._target_=own_parts.Poisoned", "+model.rank=1", "+model.step=3", "+model.value=2.0"]
    assert "The first difference is at step 3, on rank 0" in found(run, tmp_path, *poisoned)


@pytest.mark.slow
def test_the_tolerance_is_the_users(run: Run, tmp_path: Path) -> None:
    assert "check_tolerance 1e-05" in found(run, tmp_path, "strategy.comm_hook=bf16", "check_tolerance=1e-5")
    assert run(*CHECK, "check_tolerance=0.1", "check_steps=2", world_size=2)["status"] == "finished"


@pytest.mark.slow
def test_a_check_from_a_checkpoint_compares_the_steps_after_it(run: Run) -> None:
    trained = run("data.num_samples=61", "trainer.max_steps=3", "optimizer=adamw", world_size=2)["last_checkpoint"]
    assert run(*CHECK, "optimizer=adamw", f"ckpt_path={trained}", world_size=2)["global_step"] == 3
    with pytest.raises(RequestError, match="at step 3 a limit of trainer"):
        run(*CHECK, "optimizer=adamw", f"ckpt_path={trained}", "trainer.max_steps=3", world_size=2)


@pytest.mark.slow
def test_only_training_is_compared(run: Run) -> None:
    with pytest.raises(RequestError, match="check=equivalence compares training, but mode=validate is none"):
        run(*CHECK, "mode=validate")
    with pytest.raises(RequestError, match=r"Manual takes its optimizer steps itself .automatic_optimization=False"):
        run(*CHECK, "model._target_=lightning_parts.Manual", "task=lightning")
    with pytest.raises(RequestError, match=r"of one backward pass a batch, and LBFGS takes several, by a closure"):
        run(*CHECK, "model._target_=lightning_parts.Memory", "task=lightning")
    with pytest.raises(RequestError, match=r"compares gradients, and strategy.comm_hook=powersgd exchanges approximat"):
        run(*CHECK, "strategy=ddp", "+strategy.comm_hook=powersgd")


COUNTS = [
    ("attribute", "seen is 16, 4 there"),
    ("late", "since is 16, 4 there"),
    ("dict", "stats.passes is 16, 4 there"),
    ("class", "exact_parts.Counting.passes is 16, 4 there"),
    ("global", "exact_parts.PASSES is 16, 4 there"),
]


@pytest.mark.parametrize(("where", "name"), slow_but([COUNTS[2]], COUNTS, [COUNTS[4]]))
def test_a_count_of_forward_passes_is_named(where: str, name: str, run: Run, tmp_path: Path) -> None:
    model = ["model._target_=exact_parts.Counting", f"+model.where={where}", "check_steps=4"]
    message = found(run, tmp_path / "exact", *model, "strategy=ddp_exact", "strategy.shards=8", "data.batch_size=2")
    assert f"strategy=single does: the model counts, and after 4 steps {name}" in message
    assert "Have it follow the optimizer steps" in message
    summary = json.loads((tmp_path / "exact" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["metrics"]["check/gradient"] < 1e-5
    assert run(*CHECK, *model, world_size=2)["status"] == "finished", "ddp takes as many passes as one process"


@pytest.mark.slow
def test_a_count_of_samples_is_named_and_what_is_noted_of_a_batch_is_not(run: Run, tmp_path: Path) -> None:
    model = ["model._target_=exact_parts.Counting", "check_steps=5"]
    assert "after 5 steps seen is 39, 77 there" in found(run, tmp_path, *model, "+model.where=samples")
    assert run(*CHECK, *model, "+model.where=notes", *EXACT, world_size=2)["status"] == "finished"


@pytest.mark.slow
def test_a_count_in_a_task_or_in_a_sharded_model_is_named(run: Run, tmp_path: Path) -> None:
    fsdp = ["strategy=fsdp", "strategy.shards=4", "strategy.wrap=[net1,net2]", "data.batch_size=2", "check_steps=4"]
    model = ["model._target_=exact_parts.Counting", "+model.where=attribute"]
    assert "after 4 steps seen is 8, 4 there" in found(run, tmp_path / "model", *fsdp, *model)
    task = "task._target_=exact_parts.CountingTask"
    assert "after 4 steps steps is 8, 4 there" in found(run, tmp_path / "task", *fsdp, task)
