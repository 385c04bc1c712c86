"""What a user asks for at the edge is done, or refused by name: nothing is ignored."""

import inspect
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp_recipes
from ddp_recipes import rank
from ddp_recipes.config.settings import better
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.tasks import Accuracy, Task
from ddp_recipes.testing import make_job
from helpers.marks import quick_each
from helpers.patience import patience
from helpers.ranks import run_recipe

TINY = ["data=random", "data.num_samples=64", "data.batch_size=16", "data.val_samples=16", "model=toy", "logger=none"]
QUICK = [*TINY, "launcher.device=cpu", "strategy=single", "trainer.progress=false", "trainer.num_sanity_val_steps=0"]
DIGITS = ["data=digits", "model=linear", *QUICK[5:]]


def summary_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


# --- buffers whose shape changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", quick_each(2, [["strategy=ddp_exact"], ["strategy=fsdp", "strategy.wrap=[net1,net2]"]]))
def test_a_buffer_that_grows_is_refused_by_its_name_where_shards_are_added(own: list[str], tmp_path: Path) -> None:
    growing = [*TINY, "model._target_=exact_parts.Growing", "trainer.max_epochs=1", "launcher.device=cpu"]
    message = r"The buffer model.seen was of shape \[0, \d+\] and is now of \[1, \d+\]. .* must keep its shape"
    with pytest.raises(RunFailed, match=message):
        run_recipe([*growing, *own, "strategy.shards=2"], 2, tmp_path / "sums")
    assert run_recipe([*growing, "strategy=ddp"], 2, tmp_path / "ddp")["status"] == "finished"


# --- the direction of a metric ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("val/loss", "min"),
        ("val/accuracy", "max"),
        ("val_acc", "max"),
        ("valid_loss", "min"),
        ("val/f1_score", "max"),
        ("val/f1_loss", "min"),
        ("val/MulticlassF1Score", "max"),
        ("val/mIoU", "max"),
        ("val/MeanSquaredError", "min"),
        ("train/samples_per_second", None),
        ("val/kappa", None),
    ],
)
def test_direction_follows_the_name_of_a_metric(metric: str, mode: str | None) -> None:
    assert better(metric) == mode


def test_best_checkpoint_is_the_one_with_the_highest_accuracy(tmp_path: Path) -> None:
    run_recipe([*DIGITS, "trainer.max_epochs=3", "checkpoint.monitor=val/accuracy"], directory=tmp_path)
    states = [torch.load(path, weights_only=True) for path in (tmp_path / "checkpoints").glob("*.pt")]
    best = torch.load(tmp_path / "checkpoints" / "best.pt", weights_only=True)
    assert best["metrics"]["val/accuracy"] == max(state["metrics"]["val/accuracy"] for state in states)
    values = states[-1]["checkpointer"]["values"].values()
    assert max(values) == best["metrics"]["val/accuracy"]


def test_unknown_direction_is_refused_and_may_be_given() -> None:
    from ddp_recipes.callbacks.early_stopping import EarlyStopping

    refused = r"checkpoint\.mode=auto, and the name train/grad_norm does not tell .* Set checkpoint\.mode=min or max\."
    with pytest.raises(RequestError, match=refused):
        run_recipe([*QUICK, "checkpoint.monitor=train/grad_norm"])
    assert run_recipe([*QUICK, "trainer.max_epochs=1", "checkpoint.monitor=train/grad_norm", "checkpoint.mode=min"])
    with pytest.raises(RequestError, match="the name val/kappa does not tell"):
        EarlyStopping("val/kappa")


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["validate", "predict"])
def test_scoring_initial_weights_is_said(mode: str, tmp_path: Path) -> None:
    run_recipe([*QUICK, f"mode={mode}"], directory=tmp_path)
    assert (
        f"mode={mode} without ckpt_path: the weights are the model's initial ones."
        in (tmp_path / "train.log").read_text()
    )


PLATEAU = [
    *("scheduler=step", "~scheduler.step_size", "~scheduler.gamma", "optimizer.lr=0.04", "trainer.max_epochs=4"),
    *("scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau", "+scheduler.factor=0.5"),
    *(
        "+scheduler.patience=0",
        "+scheduler.threshold=99",
        "+scheduler.threshold_mode=abs",
    ),  # nothing is that much better
]


@pytest.mark.parametrize("monitor", [[], ["+scheduler.monitor=train/loss", "data.val=null"]])
def test_a_scheduler_that_follows_a_metric_is_told_it(monitor: list[str], tmp_path: Path) -> None:
    summary = run_recipe([*QUICK, *PLATEAU, *monitor, "trainer.log_every_n_steps=1"], directory=tmp_path)
    assert summary["metrics"]["train/lr"] == 0.04 / 4, "after the second and the third epoch"
    with pytest.raises(RequestError, match=r"scheduler.monitor=val/loss is for ReduceLROnPlateau: ConstantLR"):
        run_recipe([*QUICK, "+scheduler.monitor=val/loss"], directory=tmp_path / "another")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_refused_once_it_has_begun_has_failed(world_size: int, tmp_path: Path) -> None:
    overrides = [*QUICK, *PLATEAU, "strategy=ddp", "+scheduler.monitor=train/loss"]  # which a later step measures
    with pytest.raises(RequestError, match=r"ReduceLROnPlateau follows train/loss, which is not measured"):
        run_recipe(overrides, world_size, tmp_path)
    summary = summary_of(tmp_path)
    assert summary["status"] == "failed"
    assert summary["error"].startswith("ReduceLROnPlateau follows train/loss")


def test_a_scheduler_follows_validations_of_some_epochs_alone(tmp_path: Path) -> None:
    some = [*QUICK, *PLATEAU, "trainer.check_val_every_n_epoch=2"]
    whole = run_recipe([*some, "trainer.max_epochs=8"], directory=tmp_path / "whole")
    assert whole["metrics"]["train/lr"] == 0.04 / 4, "after the fourth and the sixth epoch"
    run_recipe([*some, "trainer.max_epochs=5"], directory=tmp_path / "parts")
    parts = run_recipe([*some, "trainer.max_epochs=8", "ckpt_path=auto"], directory=tmp_path / "parts")
    assert parts["weights_sha256"] == whole["weights_sha256"]
    assert "is not taken" not in (tmp_path / "parts" / "train.log").read_text(), "the rate is the schedule's"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            ["+scheduler.monitor=val/los", "trainer.num_sanity_val_steps=1"],
            "scheduler.monitor=val/los is not measured. Measured are: val/loss, val/mae",
        ),
        (["data.val=null"], "scheduler.monitor=val/loss is not measured. Measured are: train/loss"),
    ],
)
def test_a_scheduler_that_follows_what_nothing_validates_is_refused(
    own: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        run_recipe([*QUICK, *PLATEAU, *own], directory=tmp_path / "refused")
    assert not [*(tmp_path / "refused").rglob("*.log")]


def test_a_schedule_that_ends_before_the_run_is_refused(tmp_path: Path) -> None:
    one_cycle = [*QUICK, "scheduler=one_cycle"]
    with pytest.raises(RequestError, match=r"total_steps is 7, and the run comes to 8 steps.*scheduler.total_steps=8"):
        run_recipe([*one_cycle, "trainer.max_epochs=2", "scheduler.total_steps=7"], directory=tmp_path)
    run_recipe([*one_cycle, "trainer.max_epochs=2"], directory=tmp_path)
    with pytest.raises(RequestError, match="total_steps is 8 in the checkpoint, and the run comes to 12 steps"):
        run_recipe([*one_cycle, "trainer.max_epochs=3", "ckpt_path=auto"], directory=tmp_path)


def test_a_cycle_of_so_many_epochs_is_as_long(tmp_path: Path) -> None:
    longer = ["scheduler=one_cycle", "+scheduler.epochs=5", "+scheduler.steps_per_epoch=4", "trainer.max_epochs=1"]
    assert run_recipe([*QUICK, *longer], directory=tmp_path)["metrics"]["train/lr"] > 0.01, "a fifth of it is done"


def test_resume_says_which_keys_of_the_optimizer_are_not_taken(tmp_path: Path) -> None:
    overrides = [*QUICK, "optimizer=sgd", "scheduler=cosine"]
    run_recipe([*overrides, "optimizer.lr=0.1", "trainer.max_epochs=1"], directory=tmp_path)
    resumed = [*overrides, "optimizer.lr=5", "optimizer.weight_decay=0.01", "trainer.max_epochs=2", "ckpt_path=auto"]
    run_recipe(resumed, directory=tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert "optimizer.lr=5 is not taken: the run resumes with the checkpoint's 0.1." in log
    assert "optimizer.weight_decay=0.01 is not taken" in log
    assert "optimizer.momentum" not in log


def test_resume_with_what_it_was_trained_with_warns_of_nothing(tmp_path: Path) -> None:
    overrides = [*QUICK, "optimizer=adamw", "scheduler=one_cycle", "scheduler.total_steps=100"]
    run_recipe([*overrides, "trainer.max_epochs=1"], directory=tmp_path)
    run_recipe([*overrides, "trainer.max_epochs=2", "ckpt_path=auto"], directory=tmp_path)
    assert "is not taken" not in (tmp_path / "train.log").read_text()


def test_resume_says_what_schedules_within_the_schedule_do_not_take(tmp_path: Path) -> None:
    warmed = [*QUICK, "scheduler=warmup_cosine", "scheduler.milestones=[2]"]
    run_recipe([*warmed, "trainer.max_epochs=1"], directory=tmp_path)
    run_recipe([*warmed, "trainer.max_epochs=4", "ckpt_path=auto"], directory=tmp_path)
    said = "scheduler.schedulers.1.T_max=14 is not taken: the run resumes with the checkpoint's 2."
    assert said in (tmp_path / "train.log").read_text()


def test_resume_refuses_another_class_of_optimizer(tmp_path: Path) -> None:
    run_recipe([*QUICK, "optimizer=sgd", "trainer.max_epochs=1"], directory=tmp_path)
    with pytest.raises(RequestError, match="trained with the optimizer SGD, this run has AdamW"):
        run_recipe([*QUICK, "optimizer=adamw", "trainer.max_epochs=2", "ckpt_path=auto"], directory=tmp_path)


# --- data and tasks --------------------------------------------------------------------------------------------------


def test_an_added_key_of_data_that_does_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match=r"data\.transforms is no key of data, and nothing refers to it"):
        make_job([*QUICK, "+data.transforms=my.Transforms"])
    with pytest.raises(RequestError, match=r"Did you mean .*pin_memory"):
        make_job([*QUICK, "++data.pin_memroy=true"])
    make_job([*QUICK, "+data.size=32", "data.num_samples=${data.size}"])
    make_job([*QUICK, "++data.drop_last=true"])


def test_outputs_that_would_be_broadcast_to_targets_are_refused() -> None:
    task = Task(torch.nn.Linear(3, 1), torch.nn.MSELoss())
    with pytest.raises(RequestError, match=r"outputs are \[4, 1\] and the targets \[4\]"):
        task.training_step((torch.ones(4, 3), torch.ones(4)))
    assert task.training_step((torch.ones(4, 3), torch.ones(4, 1))).loss.isfinite()


def test_accuracy_of_pixels_is_their_mean() -> None:
    outputs = torch.tensor([[[[3.0, 0.0]], [[1.0, 1.0]]], [[[0.0, 0.0]], [[1.0, 1.0]]]])  # [2, 2, 1, 2]
    targets = torch.tensor([[[0, 0]], [[1, 1]]])  # [2, 1, 2]
    assert Accuracy()(outputs, targets).tolist() == [0.5, 1.0]
    assert Accuracy()(torch.eye(2), torch.tensor([0, 0])).tolist() == [1.0, 0.0]


def test_a_run_shorter_than_the_log_interval_logs_its_last_step(tmp_path: Path) -> None:
    summary = run_recipe([*QUICK, "trainer.max_steps=3", "trainer.log_every_n_steps=50"], directory=tmp_path)
    assert summary["metrics"]["train/loss"] > 0


# --- Hydra's habits --------------------------------------------------------------------------------------------------

YAML = {
    "shadowed": (
        "model/toy.yaml",
        "_target_: torch.nn.Linear\nin_features: ${data.in_features}\nout_features: ${data.out_features}\n",
    ),
    "sweep": (
        "swept.yaml",
        "defaults: [train, _self_]\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 1,2\n",
    ),
}


def command(python: str, folder: Path, files: Mapping[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run in a folder, with these files in its ``conf``."""
    for name, text in files.items():
        (folder / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "conf" / name).write_text(text)
    call = [python, "-m", "ddp_recipes", "--config-dir", "conf", *overrides]
    return subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=patience(120))


def test_own_yaml_wins_over_a_shipped_one_of_its_name(tmp_path: Path, python: str) -> None:
    run = [*QUICK, "trainer.max_epochs=1", "hydra.run.dir=run"]
    done = command(python, tmp_path, dict([YAML["shadowed"]]), *run)
    assert done.returncode == 0, done.stderr
    assert "Linear, " in done.stdout


@pytest.mark.slow
def test_hydra_mode_of_a_yaml_is_a_sweep(tmp_path: Path, python: str) -> None:
    run = ["--config-name", "swept", *QUICK, "trainer.max_epochs=1", "hydra.sweep.dir=sweep"]
    done = command(python, tmp_path, dict([YAML["sweep"]]), *run)
    assert done.returncode == 0, done.stderr
    assert [summary_of(tmp_path / "sweep" / job)["status"] for job in "01"] == ["finished", "finished"]


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("trainer.devices=2", "launcher.nproc_per_node"),
        ("trainer.accelerator=gpu", "launcher.device"),
        ("trainer.tpu_cores=8", "launcher.device"),
        ("trainer.weights_summary=full", "callbacks=model_summary"),
        ("trainer.progress_bar_refresh_rate=20", "trainer.progress"),
    ],
)
def test_what_lightning_calls_otherwise_is_named(override: str, ours: str) -> None:
    with pytest.raises(RequestError, match=rf"What Lightning calls so is {ours} here\."):
        make_job([*QUICK, override])


@pytest.mark.slow
def test_each_key_of_lightnings_trainer_is_one_here_or_has_its_place_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which Lightning would set, and leave
    trainer = pytest.importorskip("lightning").Trainer
    here = make_job(QUICK).config["trainer"]
    for key in inspect.signature(trainer.__init__).parameters.keys() - {"self", *here}:
        with pytest.raises(
            RequestError, match=rf"there is no key trainer\.{key}\. What Lightning calls so is .+ here\."
        ):
            make_job([*QUICK, f"trainer.{key}=1"])


def test_how_exact_products_are_holds_for_one_run(tmp_path: Path) -> None:
    """Of several in this process each has its own."""
    found = []
    for more in (["trainer.matmul_precision=medium", "trainer.benchmark=true"], []):
        one = ["launcher.nproc_per_node=1", "launcher.device=cpu", f"hydra.run.dir={tmp_path / str(len(more))}"]
        ddp_recipes.run([*QUICK, *one, "trainer.max_steps=1", *more])
        found.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark))
    assert found == [("medium", True), ("highest", False)]


@pytest.mark.parametrize(
    ("own", "said"),
    quick_each(
        4,
        [
            ("", 1),
            ("trainer.matmul_precision=high", 0),
            ("trainer.matmul_precision=highest", 0),
            ("trainer.precision=bf16-mixed", 0),
        ],
    ),
)
def test_that_tensor_cores_are_idle_is_said_once(
    own: str, said: int, run: Callable[..., Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "leaves_tensor_cores_idle", lambda device: True)
    ended = run("trainer.max_steps=1", *own.split(), world_size=2)
    log = (Path(ended["run_directory"]) / "train.log").read_text()
    assert log.count("set trainer.matmul_precision=high for TF32") == said


def test_kernels_that_are_tried_out_are_not_deterministic() -> None:
    with pytest.raises(RequestError, match=r"trainer\.benchmark=true picks kernels .* leave out one"):
        run_recipe([*QUICK, "trainer.benchmark=true", "trainer.deterministic=true"])


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\n\ndef f(:\n", r"SyntaxError: invalid syntax \(.*broken_0\.py, line 3\)"),
        ("import not_there_at_all\n", r"ModuleNotFoundError: No module named 'not_there_at_all' \(.*_1\.py, line 1\)"),
        ("\nNET = {}['missing']\n", r"KeyError: 'missing' \(.*broken_2\.py, line 2\)"),
    ],
)
def test_a_module_that_does_not_import_is_named_with_file_and_line(
    text: str, message: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{request.node.callspec.indices['text']}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match=rf"model\._target_={name}\.Net cannot be imported: {message}"):
        run_recipe([*QUICK, f"model._target_={name}.Net"])
    with pytest.raises(RequestError, match=rf"callbacks\.own\._target_={name}\.Own cannot be imported: {message}"):
        run_recipe([*QUICK, f"+callbacks.own._target_={name}.Own"])


# --- gradients that come late, or are sparse --------------------------------------------------------------------------

LATE = [[], ["+optimizer.dampening=0.5"], ["optimizer.weight_decay=0.1", "optimizer.nesterov=true"]]


@pytest.mark.parametrize("own", LATE)
def test_a_fused_optimizer_takes_gradients_that_come_late(own: list[str], tmp_path: Path) -> None:
    """torch's has momentum of all parameters or of none."""
    late = [*QUICK, "model._target_=differential.architectures.LateHead", "trainer.max_steps=8", *own]
    ours, unfused = (
        run_recipe([*late, *more], directory=tmp_path / str(len(more))) for more in ([], ["optimizer.fused=false"])
    )
    assert ours["metrics"]["val/loss"] == pytest.approx(unfused["metrics"]["val/loss"], rel=1e-5)


@pytest.mark.parametrize("clip", [[], ["trainer.gradient_clip_val=0.3"]])
@pytest.mark.parametrize("name", ["SparseWords", "FunctionalSparse"])
def test_sparse_gradients_learn_what_dense_ones_do(name: str, clip: list[str], tmp_path: Path) -> None:
    words = [*QUICK, "trainer.max_steps=6", "trainer.log_every_n_steps=1", *clip]
    models = [f"model._target_=differential.architectures.{each}" for each in (name, "DenseWords")]
    sparse, dense = (run_recipe([*words, each], directory=tmp_path / each[-9:]) for each in models)
    for metric in ("val/loss", "train/grad_norm"):
        assert sparse["metrics"][metric] == pytest.approx(dense["metrics"][metric], rel=1e-5)
