"""What a run may be given besides the loop: the shipped callbacks, and those of a user's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_recipes.checkpointing.files import newest_first, step_files
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.tensors import digest, put_together
from helpers.marks import needs, slow_but

Run = Callable[..., Summary]

SAVING = ["data.num_samples=61", "trainer.max_epochs=3", "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
EMA = ["callbacks=ema", "callbacks.ema.decay=0.8"]


def states(summary: Summary) -> dict[int, dict[str, Any]]:
    """Return the checkpoints of a run by their steps."""
    paths = newest_first(Path(summary["run_directory"]) / "checkpoints")
    return {state["cursor"]["step"]: state for state in map(put_together, map(load, paths))}


def test_early_stopping_is_refused_where_its_metric_is_never_measured(run: Run) -> None:
    with pytest.raises(RequestError, match=r"monitor=val/loss, but there is no validation set. Give one as data\.val"):
        run("callbacks=early_stopping", "data.val=null")
    several = ["~data.val", "+data.val={a: ${data.train}, b: ${data.train}}"]
    with pytest.raises(RequestError, match=r"but validation sets are val/a, val/b\. Set it to val/a/loss"):
        run("callbacks=early_stopping", *several)
    run("callbacks=early_stopping", "callbacks.early_stopping.monitor=val/b/loss", *several)


# --- EMA -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_holds_the_averages_and_what_is_trained(run: Run) -> None:
    plain, averaged = (run(*SAVING, "strategy=single", *more) for more in ([], EMA))
    trained = {step: state["model"] for step, state in states(plain).items()}
    found = states(averaged)
    expected = {name: value.clone() for name, value in trained[1].items()}
    for step, state in sorted(found.items()):
        for name, value in trained[step].items():
            assert torch.equal(state["callbacks"]["ema"][name], value)  # training goes on as without it
            expected[name] = expected[name] if step == 1 else 0.8 * expected[name] + 0.2 * value
            torch.testing.assert_close(state["model"][name], expected[name])
    last = found[max(found)]["model"]
    assert averaged["weights_sha256"] == digest(last) != plain["weights_sha256"]
    validated = run("mode=validate", f"ckpt_path={averaged['last_checkpoint']}", "strategy=single")
    assert validated["metrics"]["val/loss"] == averaged["metrics"]["val/loss"] != plain["metrics"]["val/loss"]


SHAPES = {
    "single": (1, ["strategy=single"]),
    "ddp": (2, []),
    "async_save": (2, ["checkpoint.async_save=true"]),
    "batch norm, from step 4, every second": (
        2,
        ["model._target_=own_parts.Norm", "callbacks.ema.every_n_steps=2", "callbacks.ema.start_step=4"],
    ),
    "16-mixed": (1, ["trainer.precision=16-mixed"]),
    "ddp_exact": (2, ["strategy=ddp_exact", "data.global_batch_size=16"]),
    "fsdp": (2, ["strategy=fsdp", "strategy.wrap=[net1,net2]", "data.global_batch_size=16"]),
    "ddp_pipeline": (2, ["strategy=ddp_pipeline"]),
    "ddp_pipeline, two replicas": (4, ["strategy=ddp_pipeline"]),
    "parameter_server": (4, ["strategy=parameter_server", "strategy.servers=2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    slow_but(["ddp"], SHAPES, daily=["single", "fsdp", "batch norm, from step 4, every second"]),
)
def test_averages_resume_with_the_same_bits(shape: str, run: Run) -> None:
    world_size, more = SHAPES[shape]
    overrides = [*SAVING, *EMA, "optimizer=adamw", "scheduler=cosine", *more]
    whole = run(*overrides, world_size=world_size)
    found = states(whole)
    assert whole["weights_sha256"] == digest(found[max(found)]["model"])
    for step in (3, 5):
        path = step_files(Path(whole["run_directory"]) / "checkpoints")[step]
        resumed = run(*overrides, f"ckpt_path={path}", world_size=world_size)
        assert resumed["weights_sha256"] == whole["weights_sha256"]
        assert resumed["metrics"]["val/loss"] == whole["metrics"]["val/loss"]
        last = states(resumed)[max(found)]["callbacks"]["ema"]
        assert all(torch.equal(last[name], value) for name, value in found[max(found)]["callbacks"]["ema"].items())


@pytest.mark.slow
def test_strategies_have_the_averages_of_one_process(run: Run) -> None:
    alone = states(run(*SAVING, *EMA, "strategy=single", "data.global_batch_size=16"))
    for strategy, world_size in (("ddp", 2), ("ddp_pipeline", 2), ("parameter_server", 3)):
        size = ["data.global_batch_size=16", f"strategy={strategy}"]
        found = states(run(*SAVING, *EMA, *size, world_size=world_size))
        for step, state in found.items():
            for name, value in alone[step]["model"].items():
                torch.testing.assert_close(state["model"][name], value)


def test_a_checkpoint_goes_on_without_a_callback_and_says_so(run: Run, tmp_path: Path) -> None:
    run(*EMA, "trainer.max_epochs=1", directory=tmp_path / "run")
    run("ckpt_path=auto", directory=tmp_path / "run")
    assert "callbacks.ema is not in this run" in (tmp_path / "run" / "train.log").read_text()


SCHEDULE_FREE = ["~optimizer", "+optimizer={_target_: own_parts.ScheduleFree, _partial_: true, lr: 0.1}"]


def test_an_optimizer_with_two_modes_is_evaluated_in_the_one_and_trains_in_the_other(run: Run) -> None:
    """Where it is validated and saved changes no bit; a checkpoint has the weights to evaluate, and goes on."""
    seldom = ["data.num_samples=61", "trainer.max_epochs=3", "trainer.check_val_every_n_epoch=3", *SCHEDULE_FREE]
    assert run(*seldom, "checkpoint=none")["weights_sha256"] == run(*SAVING, *SCHEDULE_FREE)["weights_sha256"]
    whole = run(*SAVING, *SCHEDULE_FREE)
    found = states(whole)
    assert whole["weights_sha256"] == digest(found[max(found)]["model"])
    validated = run("mode=validate", f"ckpt_path={whole['last_checkpoint']}")
    assert validated["metrics"]["val/loss"] == whole["metrics"]["val/loss"]
    path = step_files(Path(whole["run_directory"]) / "checkpoints")[3]
    assert run(*SAVING, *SCHEDULE_FREE, f"ckpt_path={path}")["weights_sha256"] == whole["weights_sha256"]


# --- several, and what they leave ------------------------------------------------------------------------------------


def test_several_are_a_list_and_each_writes_what_it_says(run: Run, tmp_path: Path) -> None:
    overrides = ["callbacks=[ema,lr_monitor,model_summary]", "logger=csv", "trainer.log_every_n_steps=2"]
    summary = run(*overrides, "optimizer.lr=0.1", "scheduler=step", "scheduler.step_size=1", directory=tmp_path / "run")
    rows = [line.split(",") for line in (tmp_path / "run" / "csv" / "metrics.csv").read_text().splitlines()]
    at = rows[0].index("lr/0"), rows[0].index("train/lr")
    logged = [(row[at[0]], row[at[1]]) for row in rows[1:] if row[at[1]]]
    assert len(logged) == summary["global_step"] // 2
    assert all(one == other for one, other in logged)
    assert len({one for one, _ in logged}) == 2
    text = (tmp_path / "run" / "train.log").read_text()
    assert "net1    Linear         110      110" in text
    assert "all     Toy            165      165" in text
    assert (tmp_path / "run" / "checkpoints" / "best.pt").exists()


BLOWING = """
import torch
from ddp_recipes import Callback

class Blowing(Callback):
    def on_start(self, directory, task):
        self.task = task

    def on_step(self, step):
        with torch.no_grad():
            for each in self.task.parameters() if step == 1 else ():
                each.mul_(50)  # so that gradients of the next step overflow in 16 bits
"""


def test_rates_are_logged_where_the_first_step_after_a_resume_is_skipped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blowing.py").write_text(BLOWING)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["callbacks=lr_monitor", "+callbacks.blowing._target_=blowing.Blowing", "trainer.precision=16-mixed"]
    own += ["logger=csv", "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
    run(*own, "trainer.max_steps=2", directory=tmp_path / "whole")
    first = step_files(tmp_path / "whole" / "checkpoints")[1]
    run(*own, "trainer.max_steps=2", f"ckpt_path={first}", directory=tmp_path / "rest")
    for folder in ("whole", "rest"):
        names, *_, last = (tmp_path / folder / "csv" / "metrics.csv").read_text().splitlines()
        values = dict(zip(names.split(","), last.split(","), strict=True))
        assert values["train/grad_norm"] in ("inf", "nan")  # and the step is skipped
        assert (values["step"], values["lr/0"]) == ("2", "0.05")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "+callbacks.mine={_target_: torch.nn.Identity}",
            "callbacks.mine._target_=torch.nn.Identity is a module, and callbacks.mine takes a callback",
        ),
        ("callbacks=[ema,lr_monitr]", "lr_monitor"),
        ("callbacks.ema.decay=1.5", "Allowed: decay from 0 to below 1"),
        ("callbacks.model_summary.max_depth=0", "Allowed: -1 for all"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    override: str, message: str, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        run("callbacks=[ema,model_summary]", override, directory=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_state_that_no_checkpoint_holds_is_refused_before_training(world_size: int, run: Run, tmp_path: Path) -> None:
    mine = "+callbacks.mine={_target_: own_parts.Seen}"
    words = r"callbacks\.mine\.state\(\)/of/steps: set cannot be in a checkpoint\. Allowed: tensors, numbers, texts"
    with pytest.raises(RequestError, match=words):
        run(mine, world_size=world_size, directory=tmp_path / "refused")
    assert not list(tmp_path.rglob("refused/*"))
    assert run(mine, "checkpoint=none", world_size=world_size)["status"] == "finished"
    with pytest.raises(RuntimeError, match="callbacks/mine/of/steps: set cannot be in a checkpoint"):
        run(mine, "+callbacks.mine.late=true", world_size=world_size)  # which is not there before the run has begun


# --- accumulation by epoch -------------------------------------------------------------------------------------------

ACCUMULATING = [
    "callbacks=gradient_accumulation",
    "callbacks.gradient_accumulation.schedule={1: 2, 2: 3}",
    "scheduler=cosine",
    "trainer.max_epochs=4",
]


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2]))
def test_accumulation_follows_the_epoch_and_resumes_with_the_same_bits(world_size: int, run: Run) -> None:
    overrides = [*SAVING, *ACCUMULATING, "data.global_batch_size=8"]
    whole = run(*overrides, world_size=world_size)
    assert whole["global_step"] == 8 + 4 + 3 + 3
    found = states(whole)
    ends = [step for step, state in found.items() if state["cursor"]["batch"] == 0]
    assert sorted(ends) == [8, 12, 15, 18]
    assert found[18]["scheduler"]["T_max"] == 18
    assert found[18]["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0, abs=1e-9)
    for step in (10, 12):
        path = step_files(Path(whole["run_directory"]) / "checkpoints")[step]
        resumed = run(*overrides, f"ckpt_path={path}", world_size=world_size)
        assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_a_schedule_by_epochs_has_their_number(run: Run) -> None:
    overrides = [*ACCUMULATING, "strategy=single", "scheduler.interval=epoch", "trainer.max_epochs=null"]
    for steps, epochs in ((13, 3), (12, 2), (20, 5)):
        found = states(run(*overrides, f"trainer.max_steps={steps}"))
        assert found[steps]["scheduler"]["T_max"] == epochs


# --- pictures --------------------------------------------------------------------------------------------------------

IMAGES = [
    "data=fake_images",
    "data.num_samples=16",
    "data.val_samples=9",
    "data.image_size=8",
    "model=mlp",
    "logger=tensorboard",
    "callbacks=[sample_predictions,ema]",
]


@needs("matplotlib")
@pytest.mark.parametrize(
    ("strategy", "world_size"), slow_but([], [("ddp", 2), ("ddp_pipeline", 2), ("parameter_server", 3)])
)
def test_a_picture_shows_images_with_prediction_and_target(strategy: str, world_size: int, run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = run(*IMAGES, f"strategy={strategy}", world_size=world_size)
    events = EventAccumulator(str(Path(summary["run_directory"]) / "tensorboard")).Reload()  # type: ignore[no-untyped-call]
    tags = events.Tags()["images"]  # type: ignore[no-untyped-call]
    last = f"samples/step_{summary['global_step']:08d}"
    assert len([tag for tag in tags if tag.startswith("samples/")]) == summary["epoch"] == 2
    assert events.Images(last)[0].encoded_image_string.startswith(b"\x89PNG")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            ["callbacks=sample_predictions"],
            r"give float32 \[21, 10\] and float32 \[21, 5\]",
            marks=needs("matplotlib"),
        ),
        pytest.param(
            ["callbacks=sample_predictions", "data.val=null"], "of data.val, which has none", marks=needs("matplotlib")
        ),
        (
            ["callbacks=ema", "+callbacks.slow={_target_: ddp_recipes.callbacks.EMA}"],
            "callbacks.ema and callbacks.slow",
        ),
        (["callbacks=ema", *SCHEDULE_FREE], "optimizer._target_=ScheduleFree and callbacks.ema would each be"),
        (["callbacks=gradient_accumulation", "callbacks.gradient_accumulation.schedule={a: 1}"], "is not allowed"),
        ([*ACCUMULATING, "plan=true"], "Leave that callback out"),
    ],
)
def test_what_does_not_go_with_the_run_is_refused(overrides: list[str], message: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        run(*overrides, "strategy=single", directory=tmp_path / "refused")
    assert not [path for path in (tmp_path / "refused").rglob("*") if path.stat().st_size]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_of_torch_s_optimizers_seed_neither_random_nor_numpy(optimizer: str, run: Run) -> None:
    unseeded = "+callbacks.unseeded._target_=own_parts.Unseeded"
    run(unseeded, f"optimizer={optimizer}", "trainer.max_steps=3", world_size=2)
