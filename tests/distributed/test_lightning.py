"""A module written for Lightning learns what the plain module learns."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_recipes import RequestError
from ddp_recipes.errors import Preempted, RunFailed
from ddp_recipes.lightning.events import refuse_callback
from ddp_recipes.lightning.trainer import Trainer
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.world import World
from helpers.marks import at_night, quick_each
from helpers.ranks import run_recipe

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

LIT = ["model._target_=own_parts.Lit", "task=lightning"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_learns_and_measures_what_the_plain_module_does(world_size: int, run: Run, weights: Weights) -> None:
    same = ["data.global_batch_size=16", "optimizer.lr=0.05", "scheduler=step", "scheduler.step_size=1"]
    plain = run(*same, "scheduler.gamma=0.5")
    lit = run("data.global_batch_size=16", *LIT, world_size=world_size)
    torch.testing.assert_close(weights(lit), weights(plain), rtol=0, atol=1e-6)
    for name in ("val/loss", "val/mae"):
        assert lit["metrics"][name] == pytest.approx(plain["metrics"][name], rel=1e-5)
    assert lit["metrics"]["val_loss"] == pytest.approx(lit["metrics"]["val/loss"], rel=1e-6)


LIGHTNING = ["data=lightning"]
FSDP = ["strategy=fsdp", "strategy.wrap=[net1,net2]"]
UNEVEN = ["strategy.shards=8", "data.batch_size=2", "data.num_samples=65"]
GROWS = "callbacks.gradient_accumulation.schedule"
COUNTER = "+callbacks.counted={_target_: lightning_parts.Counter, file: none}"

STOPS = [
    f"+callbacks.{name}._target_=lightning.pytorch.callbacks.{name}"
    for name in ("EarlyStopping", "LearningRateMonitor")
]
STOPS += ["+callbacks.EarlyStopping.monitor=val_loss", "+callbacks.EarlyStopping.min_delta=10"]
STOPS += ["+callbacks.EarlyStopping.patience=2", "trainer.max_epochs=6"]


def part(name: str) -> list[str]:
    return [f"model._target_=lightning_parts.{name}", "task=lightning"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_logged_metric_objects_count_each_sample_of_an_evaluation_once(world_size: int, run: Run) -> None:
    metrics = run("trainer.max_epochs=3", *part("Metric"), world_size=world_size)["metrics"]
    assert metrics["val/metric"] == pytest.approx(metrics["val/mae"], rel=1e-5)
    assert not any("train/mae" in name for name in metrics)  # it was updated, not called: no step has a value


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_metric_comes_to_is_there_in_the_hook_that_logs_it(world_size: int, run: Run) -> None:
    metrics = run(*part("ReadMetric"), world_size=world_size)["metrics"]
    assert metrics["val/late"] == metrics["val/read"] == metrics["val/metric"]
    assert metrics["late"] == metrics["read"] > 0  # though the module resets it


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_may_be_in_a_collection(world_size: int, run: Run) -> None:
    metrics = run(*part("Collected"), world_size=world_size)["metrics"]
    assert metrics["val_MeanAbsoluteError"] == pytest.approx(metrics["val/mae"], rel=1e-5)


def test_valid_loss_is_the_loss_of_validation(run: Run) -> None:
    assert run(*part("Valid"))["metrics"]["val/loss"] == run(*LIT)["metrics"]["val/loss"]
    measured = run(*part("Sized"))["metrics"]
    assert measured["val/loss"] == measured["val_loss"]


def test_batches_that_begin_with_texts_weigh_as_much_as_their_samples(run: Run) -> None:
    uneven = ("data.val_samples=21", "data.val_batch_size=8")
    named, plain = run(*part("Named"), *uneven)["metrics"], run(*LIT, *uneven)["metrics"]
    for name in ("val_loss", "val/loss", "val/mae"):
        assert named[name] == plain[name]


def test_a_metric_that_is_never_reset_is_left_alone_by_the_validation_that_begins_a_resumed_run(run: Run) -> None:
    first = run(*part("Counting"), "trainer.max_epochs=1")
    again = run(*part("Counting"), f"ckpt_path={first['last_checkpoint']}")
    assert again["metrics"]["validations"] == run(*part("Counting"))["metrics"]["validations"] == 3


def test_where_validation_has_no_loss_that_of_training_tells_the_best(run: Run) -> None:
    found = run(*part("Silent"))
    assert found["monitor"] == "train/loss"
    assert Path(found["run_directory"], "train.log").read_text().count("checkpoint.monitor=auto is") == 1
    assert found["metrics"]["val_score"] == 1
    assert found["best_checkpoint"] is not None
    assert run(*part("Silent"), "trainer.num_sanity_val_steps=0")["monitor"] == "train/loss"
    assert run(*part("Silent"), "checkpoint.monitor=val_score", "checkpoint.mode=max")["objective"] == 1
    with pytest.raises(RequestError, match=r"checkpoint\.monitor=val/loss is not measured. Measured are: .*val_score"):
        run(*part("Silent"), "checkpoint.monitor=val/loss")
    with pytest.raises(RequestError, match=r"checkpoint\.monitor=val_scoer is not measured.*Did you mean 'val_score'"):
        run(*part("Silent"), "checkpoint.monitor=val_scoer", "checkpoint.mode=max")


def test_mode_test_runs_the_test_step(run: Run) -> None:
    assert run("mode=test", "data.test=${data.val}", *part("OwnTest"))["metrics"]["test/loss"] == 7


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("Sharded", [], "Sharded defines configure_sharded_model, which task=lightning does not call"),
        ("Manual", ["trainer.gradient_clip_val=1"], "Manual optimizes by itself .* would change nothing"),
        ("Manual", ["strategy=ddp_exact"], "strategy=ddp_exact computes a batch in 12 shards, and Manual steps"),
        (
            "Manual",
            ["trainer.precision=16-mixed"],
            "16-mixed scales the loss, and Manual does backward and",
        ),
        ("Unmonitored", [], "ReduceLROnPlateau follows a metric, and there is no 'monitor'"),
        ("Forms", ["+model.form=without"], "returns a dict with lr_scheduler. Allowed: an optimizer, a dict with opt"),
        ("Forms", ["+model.form=empty"], "lr_scheduler is a dict without 'scheduler'"),
        ("Several", [], "configure_optimizers returns 2 optimizers. .* self.automatic_optimization=False"),
        ("Lit", ["trainer.val_check_interval=9"], "interval=9, and an epoch has 4 batches, so Lit would never be"),
        (
            "Lit",
            ["trainer.val_check_interval=3", "trainer.accumulate_grad_batches=2"],
            "interval=3 asks to validate Lit after every 3 of 4 batches, .* give a multiple of 2 batches",
        ),
        (
            "Lit",
            ["trainer.val_check_interval=3", "callbacks=gradient_accumulation", f"{GROWS}={{1: 2}}"],
            "interval=3 asks to validate Lit .* a callback's step from epoch 1 on takes 2 of them. Validations are bet",
        ),
        ("Nowhere", [], "logs nothing in training_step with on_step=False and on_epoch=False"),
        ("Removed", [], "Removed has validation_epoch_end, which Lightning 2 does not call .* on_validation_epoch_end"),
        ("Early", LIGHTNING, "estimated_stepping_batches is asked for in setup, before .* Ask for it in configure_opt"),
        (
            "Combined",
            LIGHTNING,
            "Combined.val_dataloader returns a CombinedLoader. Return the list or dict of its load",
        ),
        ("Vector", [], r"training_step returns a loss of shape \[2\]. Return a single number"),
        ("Memory", ["trainer.accumulate_grad_batches=2"], "returns LBFGS, .* trainer.accumulate_grad_batches=2"),
        ("Memory", FSDP, "returns LBFGS, .* does not go with strategy=fsdp"),
        ("Late", [], "logs late in on_validation_end, where Lightning does not allow it"),
        ("Shaped", [], r"logs shape of shape \[2\]. Allowed: a single number"),
        ("Texts", [], r"logs shape='round', a str\. Allowed: a single number"),
        ("Parted", [*LIGHTNING, "mode=predict"], "and predict has several: .* Return one loader for it"),
        ("Valid", LIGHTNING, "data=lightning, and Valid has no train_dataloader"),
        ("Loaders", LIGHTNING, "The DataLoader for train has a Repeated, and batches are sharded over ranks already"),
        ("Loaders", [], "Loaders brings train_dataloader, and data is another data set. Choose data=lightning"),
        ("Halved", ["strategy=ddp_pipeline"], "runs Halved as a whole on each rank, and with strategy=ddp_pipeline"),
        ("Manual", FSDP, "With strategy=fsdp a rank has some rows of .* Manual may look at .*: manual optimization"),
        ("Clipping", FSDP, "and Clipping may look at all of them: configure_gradient_clipping"),
        ("Lit", [*FSDP, *UNEVEN], "for its shards .65 samples in batches of 16 over 8 ranks"),
        ("Lit", [*FSDP, COUNTER], "Counter is written for Lightning and may look at all weights, of which a rank"),
        ("Valid", ["mode=test", "data.test=${data.val}", "model._target_=lightning_parts.Untested"], "mode=test runs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    own = ["model=toy", "data.in_features=10", "data.out_features=5"]
    own += [] if LIGHTNING[0] in overrides else ["data=random", "data.num_samples=64"]
    with pytest.raises(RequestError, match=message):
        run_recipe([*own, *part(name), "logger=none", *overrides], 2 if name == "Halved" else 1, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own"), [("Direct", []), ("Built", []), ("Direct", STOPS)])
def test_a_module_that_ranks_hold_together_ends_as_one_that_each_has(name: str, own: list[str], run: Run) -> None:
    common = [*part(name), *own, "data.num_samples=72", "data.batch_size=2", "trainer.gradient_clip_val=0.1"]
    common += ["trainer.log_every_n_steps=1", "data.val_samples=24"]
    exact = run(*common, "strategy=ddp_exact", "strategy.shards=6")
    assert (exact["epoch"] == 3) == bool(own), "Lightning's callback ends it after three epochs"
    found = [run(*common, *FSDP, "strategy.shards=6", world_size=size) for size in (1, 3)]
    for summary in found:
        assert summary["weights_sha256"] == exact["weights_sha256"]
        for metric in ("train/loss", "train/grad_norm", "val_loss"):
            assert summary["metrics"][metric] == exact["metrics"][metric]
    again = ["strategy.shards=6", "mode=validate", f"ckpt_path={found[-1]['run_directory']}"]
    assert run(*common, *FSDP, *again, world_size=2)["metrics"]["val_loss"] == exact["metrics"]["val_loss"]


def test_a_rank_without_a_sample_of_a_batch_adds_nothing_to_its_gradients(run: Run) -> None:
    last_of_two = ["data.num_samples=26", "data.global_batch_size=12", "strategy=ddp_exact", "strategy.shards=12"]
    one, three = (run(*part("Valid"), *last_of_two, world_size=size) for size in (1, 3))
    assert one["weights_sha256"] == three["weights_sha256"]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_exact"])
def test_an_epoch_whose_last_batch_leaves_a_rank_without_a_sample_counts_each_once(strategy: str, run: Run) -> None:
    uneven = [*part("Counted"), "data.num_samples=65", "data.global_batch_size=16", f"strategy={strategy}"]
    uneven += ["strategy.shards=4"] if strategy == "ddp_exact" else []
    one, two = (run(*uneven, world_size=ranks)["metrics"] for ranks in (1, 2))
    assert (one["samples"], two["samples"], two["ranks"]) == (65, 65, 2)
    assert one["batch"] == two["batch"] == 4
    for name in ("val_loss", "val/mae"):
        assert two[name] == pytest.approx(one[name], rel=1e-5)


def test_a_batch_that_is_computed_in_shards_is_one_for_hooks(run: Run, weights: Weights) -> None:
    uneven = [*part("Taught"), "data.num_samples=65", "data.global_batch_size=16", "data.val_batch_size=2"]
    exact = [*uneven, "strategy=ddp_exact", "strategy.shards=4"]
    plain, one, two = run(*uneven), run(*exact), run(*exact, world_size=2)
    assert two["weights_sha256"] == one["weights_sha256"]
    torch.testing.assert_close(weights(one), weights(plain), rtol=0, atol=1e-6)
    assert weights(one)["batches"] == 10
    assert one["metrics"]["last"] == two["metrics"]["last"] == 2


def test_a_batch_that_is_computed_in_shards_begins_and_ends_once(run: Run, weights: Weights) -> None:
    exact = [*part("Begun"), "data.num_samples=65", "data.global_batch_size=16", "strategy=ddp_exact"]
    exact += ["strategy.shards=4", "trainer.accumulate_grad_batches=2"]
    one, two = run(*exact), run(*exact, world_size=2)
    assert two["weights_sha256"] == one["weights_sha256"]
    assert weights(one)["batches"].tolist() == [10, 10]
    assert one["metrics"]["begun"] == two["metrics"]["begun"] == 10
    for looks, hook in {"batch": "on_train_batch_start", "outputs": "on_train_batch_end"}.items():
        with pytest.raises(RequestError, match=f"{hook} of Begun or of a callback looks .* computed in 4 shards"):
            run(*exact, f"+model.looks={looks}")


@pytest.mark.parametrize("strategy", ["ddp", "ddp_exact"])
def test_a_value_is_logged_as_the_last_batch_of_the_epoch_has_it_that_logs_it(strategy: str, run: Run) -> None:
    common = [*part("First"), "data.global_batch_size=12", "trainer.accumulate_grad_batches=3"]
    metrics = run(*common, "data.num_samples=72", f"strategy={strategy}", world_size=2)["metrics"]
    assert (metrics["first"], metrics["last"], metrics["once"]) == (3, 5, 1)


def test_a_buffer_that_is_nan_before_training_is_saved_so(run: Run) -> None:
    found = run(*part("Unmeasured"), world_size=2)
    assert torch.load(found["last_checkpoint"], weights_only=True)["state_dict"]["threshold"].isnan()


def test_a_checkpoint_that_a_module_saves_is_that_of_the_run_with_averaged_weights(run: Run, tmp_path: Path) -> None:
    averaged = ["callbacks=ema", "callbacks.ema.decay=0.8"]
    found = run(*part("Saves"), f"+model.folder={tmp_path}", *averaged, world_size=2)
    last = torch.load(found["last_checkpoint"], weights_only=True)
    for name in ("validation", "epoch", "end"):
        own = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        for key in ("model", "state_dict"):
            torch.testing.assert_close(own[key], last[key], rtol=0, atol=0)
        torch.testing.assert_close(own["callbacks"]["ema"], last["callbacks"]["ema"], rtol=0, atol=0)
    assert found["weights_sha256"] == run(*LIT, *averaged, world_size=2)["weights_sha256"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_asks_the_strategy_what_other_ranks_have(world_size: int, run: Run) -> None:
    uneven = ["data.global_batch_size=16", "data.val_samples=17", "data.val_batch_size=8"]
    assert run(*part("Exchanges"), *uneven, world_size=world_size)["status"] == "finished"


@pytest.mark.parametrize(
    ("hook", "step"),
    quick_each(3, [("on_train_batch_end", 2), ("on_after_backward", 3), ("on_validation_epoch_end", 4)]),
)
def test_a_rank_that_ends_the_run_alone_ends_it_for_all(hook: str, step: int, run: Run) -> None:
    ended = run(*part("Ends"), f"+model.hook={hook}", "launcher.timeout_s=20", world_size=2)
    assert (ended["status"], ended["global_step"]) == ("finished", step)


def test_a_module_whose_optimizers_are_none_is_not_trained_by_that_of_the_config(run: Run, weights: Weights) -> None:
    one, two = (run(*part("Unchanged"), f"trainer.max_epochs={epochs}", world_size=epochs) for epochs in (1, 2))
    assert "No optimizer has a parameter of Unchanged" in Path(one["run_directory"], "train.log").read_text()
    assert one["weights_sha256"] == two["weights_sha256"]


def test_freezing_on_the_way_ends_a_run_whose_ranks_have_rows(run: Run) -> None:
    with pytest.raises(RunFailed, match=r"Freezing or a callback of it freezes other parameters than at the start"):
        run(*part("Freezing"), *FSDP, "data.val_samples=24")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_that_steps_by_itself_learns_what_the_loop_would_teach_it(
    world_size: int, run: Run, weights: Weights
) -> None:
    same = ["data.global_batch_size=16", "optimizer.lr=0.05", "optimizer.momentum=0"]
    manual = run("data.global_batch_size=16", *part("Manual"), world_size=world_size)
    torch.testing.assert_close(weights(manual), weights(run(*same)), rtol=0, atol=1e-6)


def test_sparse_gradients_of_a_module_that_steps_by_itself_stay_sparse(run: Run, weights: Weights) -> None:
    one, two = (run(*part("Looked"), "data.global_batch_size=16", world_size=ranks) for ranks in (1, 2))
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-6)


WAYS = ["clip_gradients", "clip_grad_norm_", "sharpness", "in parts"]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if at else ()) for at, way in enumerate(WAYS)]
)
def test_a_module_that_steps_by_itself_sees_the_gradients_of_all_ranks(way: str, run: Run, weights: Weights) -> None:
    manual = [*part("ManualWays"), f"+model.way='{way}'", "data.global_batch_size=16", "trainer.log_every_n_steps=1"]
    one, two = run(*manual), run(*manual, world_size=2)
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-6)
    assert two["metrics"]["norm"] == pytest.approx(one["metrics"]["norm"], rel=1e-5)


def test_a_backward_pass_of_one_rank_is_not_stepped_with(run: Run) -> None:
    alone = [*part("ManualWays"), "+model.way='by itself'", "trainer.max_epochs=1"]
    assert run(*alone)["status"] == "finished"
    with pytest.raises(
        RunFailed, match=r"training_step calls loss.backward\(\) by itself, .* Call self.manual_backward"
    ):
        run(*alone, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_closure_that_is_called_again_computes_the_gradients_anew(
    world_size: int, run: Run, weights: Weights
) -> None:
    once, twice = (
        run(*part("Valid"), "data.global_batch_size=16"),
        run(*part("ClosureTwice"), "data.global_batch_size=16", world_size=world_size),
    )
    torch.testing.assert_close(weights(twice), weights(once), rtol=0, atol=1e-6)
    exact = [*part("ClosureTwice"), "strategy=ddp_exact", "strategy.shards=4", "data.global_batch_size=16"]
    if world_size == 2:
        assert run(*exact)["weights_sha256"] == run(*exact, world_size=2)["weights_sha256"]


def test_what_a_closure_cannot_do_ends_a_run_by_name(run: Run) -> None:
    with pytest.raises(RunFailed, match=r"ClosureTwice calls its closure more than once .*accumulate_grad_batches=2"):
        run(*part("ClosureTwice"), "trainer.accumulate_grad_batches=2")
    with pytest.raises(RunFailed, match=r"NoClosure.optimizer_step calls neither optimizer_closure\(\) nor"):
        run(*part("NoClosure"))


def test_an_optimizer_that_computes_gradients_several_times_gives_the_same_on_two_ranks(
    run: Run, weights: Weights
) -> None:
    one, two = (run(*part("Memory"), "data.global_batch_size=16", world_size=size) for size in (1, 2))
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-4)
    with pytest.raises(RequestError, match=r"optimizer._target_=torch.optim.LBFGS computes .* configure_optimizers"):
        run("~optimizer", "+optimizer._target_=torch.optim.LBFGS", "+optimizer.lr=0.1")


MODE_HOOKS = ["__init__", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start"]


@pytest.mark.parametrize("hook", MODE_HOOKS)
def test_what_a_module_puts_in_eval_mode_stays_so(hook: str, run: Run, weights: Weights) -> None:
    found = weights(run(*part("Frozen"), f"+model.hook={hook}", "trainer.val_check_interval=0.5"))
    assert found["frozen.num_batches_tracked"] == 0
    assert found["norm.num_batches_tracked"] == 16


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_are_there_for_callbacks_as_soon_as_they_are_logged(world_size: int, run: Run) -> None:
    found = run(*part("InTime"), "data.global_batch_size=16", "trainer.val_check_interval=2", world_size=world_size)
    assert found["metrics"]["val_twice"] == 2 * found["global_step"]


def test_a_name_that_is_logged_twice_is_averaged_and_a_value_is_taken_as_it_is(run: Run) -> None:
    metrics = run(*part("LoggedTwice"))["metrics"]
    assert (metrics["twice"], metrics["changed"]) == (2, 1)


def test_a_loss_of_one_element_is_a_number(run: Run, weights: Weights) -> None:
    one, usual = run(*part("OneElement")), run(*part("Valid"))
    torch.testing.assert_close(weights(one), weights(usual), rtol=0, atol=0)
    assert one["metrics"]["val/loss"] == usual["metrics"]["val/loss"]


def test_ranks_may_log_what_others_do_not(run: Run) -> None:
    metrics = run(*part("OnRank0"), world_size=2)["metrics"]
    assert (metrics["val_here"], metrics["here"], metrics["there"]) == (3, 2, 5)


@pytest.mark.parametrize("samples", quick_each(2, [9, 1]))
def test_metrics_may_be_logged_where_the_last_batch_leaves_a_rank_without_a_sample(samples: int, run: Run) -> None:
    uneven = [*part("Metric"), f"data.val_samples={samples}", "data.global_batch_size=16"]
    one = run(*uneven, "data.val_batch_size=8")["metrics"]
    two = run(*uneven, "data.val_batch_size=4", world_size=2)["metrics"]
    for name in ("val/metric", "val/mae", "val_loss"):
        assert two[name] == pytest.approx(one[name], rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_batch_of_a_validation_is_a_point_where_a_module_asks_for_it(world_size: int, run: Run) -> None:
    found = run(*part("OnStep"), "logger=csv", f"data.val_batch_size={8 // world_size}", world_size=world_size)
    with (Path(found["run_directory"]) / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    points = [(int(row["step"]), float(row["val_loss_step"])) for row in rows if row["val_loss_step"]]
    points.sort()  # rows of training come between them
    assert [step for step, _ in points] == [0, 1, 2, 3, 4, 5]  # three batches in each of two epochs
    last = (8 * points[3][1] + 8 * points[4][1] + 5 * points[5][1]) / 21
    assert found["metrics"]["val_loss_epoch"] == found["metrics"]["val_loss"] == pytest.approx(last, rel=1e-5)


def test_points_of_a_validations_batches_outlive_a_start_that_has_nothing_left_to_do(run: Run, tmp_path: Path) -> None:
    own = [*part("OnStep"), "logger=csv", "data.val_batch_size=8", "trainer.limit_train_batches=1", "ckpt_path=auto"]
    for _ in range(2):  # three batches in each of two epochs of one step
        run(*own, directory=tmp_path / "run")
    with (tmp_path / "run" / "csv" / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["val_loss_step"]]
    assert sorted(steps) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_predictions_may_be_several_and_a_callback_may_write_them(tmp_path: Path, run: Run) -> None:
    predicting = ["mode=predict", "data.predict=${data.val}", "data.val_samples=21"]
    writes = [f"+callbacks.writes={{_target_: lightning_parts.Writes, folder: {tmp_path}}}"]
    found = run(*part("Predicts"), *predicting, *writes, world_size=2)
    predictions = torch.load(Path(found["run_directory"]) / "predictions.pt", weights_only=True)
    assert predictions["outputs"].shape == (21, 5)
    assert torch.equal(predictions["best"], predictions["outputs"].argmax(1))
    assert torch.equal(predictions["pair"][0], predictions["outputs"][:, 0])
    assert predictions["pair"][1] == ["a"] * 21
    written = [torch.load(path, weights_only=True) for path in tmp_path.glob("[01]_*.pt")]
    assert sorted(number for numbers, _ in written for number in numbers) == list(range(21))
    mean = "predict_step returns a tensor [] for a batch of 4 samples"
    for world_size, kind in ((1, RequestError), (2, RunFailed)):  # of two ranks the first one stops for the other
        own = [*part("PredictsTheMean"), *predicting, "data.val_batch_size=4"]
        with pytest.raises(kind, match=re.escape(mean)):
            run(*own, world_size=world_size, directory=tmp_path / str(world_size))
    assert json.loads((tmp_path / "2" / "summary.json").read_text())["error"].startswith(f"rank 1: {mean}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_finds_loaders_and_checkpoints(world_size: int, tmp_path: Path, run: Run, weights: Weights) -> None:
    found = run(*part("Looks"), f"+model.file={tmp_path}/own.ckpt", world_size=world_size)
    own = torch.load(tmp_path / "own.ckpt", weights_only=True)
    torch.testing.assert_close(dict(own["state_dict"]), weights(found), rtol=0, atol=0)
    assert own["cursor"]["step"] == found["global_step"]
    assert "optimizer" not in torch.load(tmp_path / "own.ckpt.weights", weights_only=True)


def test_loaders_and_schedulers_mean_what_they_mean_in_lightning(tmp_path: Path) -> None:
    own = ["model=toy", "data.in_features=10", "data.out_features=5", *part("Own"), "data=lightning", "logger=none"]
    own += ["trainer.max_epochs=1", "trainer.progress=false", "launcher.device=cpu"]
    assert run_recipe(own, 1, tmp_path / "all")["metrics"]["val_batches"] == 2
    overfit = run_recipe([*own, "trainer.overfit_batches=1"], 1, tmp_path / "few")
    assert overfit["metrics"]["val_batches"] == overfit["global_step"] == 1


def test_a_batch_of_training_is_of_set_0_after_a_validation_of_several(tmp_path: Path) -> None:
    own = ["model=toy", "data.in_features=10", "data.out_features=5", *part("Shifts"), "data=lightning", "logger=none"]
    assert run_recipe([*own, "trainer.max_epochs=2", "launcher.device=cpu"], 1, tmp_path)["status"] == "finished"


def test_a_stream_with_a_limit_of_batches_has_that_many_for_a_schedule(tmp_path: Path) -> None:
    own = ["model=toy", "data.in_features=10", "data.out_features=5", *part("Streamed"), "data=lightning"]
    own += ["trainer.limit_train_batches=3", "trainer.max_epochs=2", "launcher.device=cpu", "logger=none"]
    assert run_recipe(own, 1, tmp_path)["global_step"] == 6


def test_loaders_may_be_attributes_of_a_data_module(tmp_path: Path) -> None:
    own = ["model=toy", "data.in_features=10", "data.out_features=5", *LIT, "data=lightning", "logger=none"]
    own += ["+data.datamodule._target_=lightning_parts.with_loaders", "trainer.max_epochs=1", "launcher.device=cpu"]
    assert run_recipe(own, 1, tmp_path)["global_step"] == 2


def test_a_plan_of_a_module_has_its_trainer_and_copies_no_data(tmp_path: Path) -> None:
    own = ["model=toy", "data.in_features=10", "data.out_features=5", *part("Template"), "data=lightning"]
    planned = run_recipe([*own, "plan=true", "logger=none", "launcher.device=cpu"], 1, tmp_path)
    assert planned["status"] == "finished"


def test_weights_of_a_module_that_brings_its_data_are_exported(tmp_path: Path) -> None:
    own = ["model=toy", "data.in_features=10", "data.out_features=5", *part("Own"), "data=lightning", "logger=none"]
    own += ["trainer.max_epochs=1", "trainer.progress=false", "launcher.device=cpu"]
    run_recipe(own, 1, tmp_path / "trained")
    run_recipe([*own, "mode=export", f"ckpt_path={tmp_path / 'trained'}"], 1, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_optimizers_and_schedulers_are_found_as_lightning_has_them(run: Run) -> None:
    metrics = run(*part("Rates"), "trainer.max_epochs=1", "trainer.log_every_n_steps=1")["metrics"]
    assert metrics["train/lr"] == pytest.approx(0.05 * 0.5**7)


@pytest.mark.parametrize("form", ["monitor beside", "one", "a dict"])
def test_schedulers_come_in_the_forms_that_lightning_takes(form: str, run: Run) -> None:
    metrics = run(*part("Forms"), f"+model.form='{form}'", "trainer.max_epochs=3", "trainer.log_every_n_steps=1")
    assert metrics["metrics"]["train/lr"] == pytest.approx(0.025)


def test_a_module_that_steps_by_itself_gives_its_scheduler_the_metric(run: Run) -> None:
    metrics = run(*part("ManualPlateau"), "trainer.max_epochs=3", "trainer.log_every_n_steps=1")["metrics"]
    assert metrics["train/lr"] == pytest.approx(0.025)


def test_a_rate_that_is_a_tensor_is_logged_as_the_step_took_it(run: Run) -> None:
    metrics = run(*part("TensorRate"), "trainer.max_epochs=1", "trainer.log_every_n_steps=1")["metrics"]
    assert metrics["train/lr"] == pytest.approx(0.05 * 0.5**7)


def test_a_scheduler_that_asks_for_the_step_finds_it_counted(run: Run) -> None:
    metrics = run(*part("ByStep"), "trainer.max_epochs=1", "trainer.log_every_n_steps=1")["metrics"]
    assert metrics["train/lr"] == pytest.approx(0.05 * 0.5**7)


def test_a_module_finds_the_batches_of_a_step_and_may_log_lightnings_axis(run: Run) -> None:
    accumulates = "+callbacks.more={_target_: ddp_recipes.callbacks.GradientAccumulation, schedule: {1: 2}}"
    found = run(*part("Counts"), accumulates, "logger=csv", "trainer.log_every_n_steps=1")
    rows = list(csv.reader((Path(found["run_directory"]) / "csv" / "metrics.csv").read_text().splitlines()))
    assert rows[0].count("step") == 1
    assert "'step'" not in rows[0]
    assert "Counts logs step, at which Lightning logs all else" in Path(found["run_directory"], "train.log").read_text()


def test_the_devices_of_a_trainer_are_those_of_its_machine() -> None:
    trainer = Trainer(SimpleNamespace(model=None))
    trainer.run_context = SimpleNamespace(world=World(5, 8, 1, 4, 1))  # type: ignore[assignment]
    assert (trainer.num_devices, trainer.num_nodes, trainer.node_rank, trainer.world_size) == (4, 2, 1, 8)


def test_a_callback_of_the_module_takes_the_place_of_one_of_the_config(tmp_path: Path, run: Run) -> None:
    own, others = tmp_path / "own", tmp_path / "others"
    run(*part("Brings"), f"+model.file={own}", f"+callbacks.it={{_target_: lightning_parts.Counter, file: {others}}}")
    assert (own.exists(), others.exists()) == (True, False)


def test_an_own_optimizer_step_is_asked_once_a_step(run: Run) -> None:
    done = run(*part("EverySecond"), "trainer.max_epochs=1")
    assert done["metrics"]["asked"] == done["global_step"] == 8


def test_gradients_are_unscaled_once_in_16_mixed(run: Run) -> None:
    mixed = ["trainer.precision=16-mixed", "trainer.log_every_n_steps=1", "trainer.gradient_clip_val=0.5"]
    done = run(*part("Valid"), *mixed)
    assert 0 < done["metrics"]["train/grad_norm"] < 10


def test_what_module_and_callbacks_keep_is_there_after_a_resume(tmp_path: Path, run: Run) -> None:
    counter = ["+callbacks.counter._target_=lightning_parts.Counter", f"+callbacks.counter.file={tmp_path}/counted"]
    counter.append("data.global_batch_size=16")
    one, both = [tmp_path / name for name in ("one", "both")]
    whole = run(*part("Keeper"), *counter, "trainer.max_epochs=3", directory=one)
    run(*part("Keeper"), *counter, "trainer.max_epochs=1", directory=both, world_size=2)
    resumed = run(*part("Keeper"), *counter, "trainer.max_epochs=3", "ckpt_path=auto", directory=both)
    assert resumed["metrics"]["epochs"] == whole["metrics"]["epochs"] == 3
    assert (tmp_path / "counted").read_text() == f"{resumed['global_step']} steps of {resumed['global_step']}"
    kept = torch.load(whole["last_checkpoint"], weights_only=True)
    assert kept["state_dict"].keys() == kept["model"].keys()


@pytest.mark.parametrize("world_size", [1, *at_night(2)])
def test_a_module_is_told_which_checkpoint_the_run_starts_from(world_size: int, tmp_path: Path, run: Run) -> None:
    model, both = [*part("TellsStart"), "ckpt_path=auto"], tmp_path / "both"
    run(*model, world_size=world_size, directory=both)
    assert (both / "start_0").read_text() == "None"
    newest = max((both / "checkpoints").glob("step_*.pt"))
    run(*model, "trainer.max_epochs=3", world_size=world_size, directory=both)
    for rank in range(world_size):
        assert (both / f"start_{rank}").read_text() == str(newest)


def test_weights_that_a_module_leaves_out_of_its_state_are_there_after_a_resume(tmp_path: Path, run: Run) -> None:
    common = ["data.num_samples=65", "data.global_batch_size=16", "trainer.max_epochs=2"]
    whole = run(*part("Taught"), *common)
    run(*part("Slim"), *common, "trainer.max_epochs=1", directory=tmp_path / "slim")
    resumed = run(*part("Slim"), *common, "ckpt_path=auto", directory=tmp_path / "slim")
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_a_metric_may_be_the_loss(run: Run) -> None:
    """What it counts is no state of the model's."""
    found = run(*part("MetricAsLoss"))
    assert "Python attributes" not in (Path(found["run_directory"]) / "train.log").read_text()


@pytest.mark.slow
def test_callbacks_are_told_of_a_failure_and_of_a_signal(tmp_path: Path, run: Run) -> None:
    counter = ["+callbacks.counter._target_=lightning_parts.Counter", f"+callbacks.counter.file={tmp_path}/counted"]
    with pytest.raises(RuntimeError, match="told to"):
        run(*part("Keeper"), *counter, "+model.fails=true")
    assert (tmp_path / "counted").read_text() == "failed: RuntimeError('told to')"
    to_itself = "{_target_: own_parts.Signalled, where: step, step: 2, rank: 0, name: SIGTERM, times: 1}"
    with pytest.raises(Preempted):
        run(*part("Keeper"), *counter, f"+callbacks.signalled={to_itself}", STOPS[1])
    assert (tmp_path / "counted").read_text() == "failed: SIGTERMException()"


def test_what_is_handled_around_a_run_is_no_failure_of_it(tmp_path: Path, run: Run) -> None:
    counter = ["+callbacks.counter._target_=lightning_parts.Counter", f"+callbacks.counter.file={tmp_path}/counted"]
    try:
        raise RuntimeError("tried before")
    except RuntimeError:
        steps = run(*part("Keeper"), *counter, warm=False)["global_step"]
    assert (tmp_path / "counted").read_text() == f"{steps} steps of {steps}"


def test_a_checkpoint_takes_plain_data_under_names_of_its_own(run: Run) -> None:
    own = [*part("Unsafe"), "trainer.max_epochs=1"]
    found = run(*own)
    log = (Path(found["run_directory"]) / "train.log").read_text()
    assert log.count("Unsafe adds 'self' to checkpoints, which only running code could load.") == 1
    saved = torch.load(found["last_checkpoint"], weights_only=True)
    assert (saved["best"], "averaged" in saved, "self" in saved) == (0.5, True, False)
    whole, path = run(*own, "trainer.max_epochs=2"), f"ckpt_path={found['last_checkpoint']}"
    assert run(*own, "trainer.max_epochs=2", path)["weights_sha256"] == whole["weights_sha256"]
    with pytest.raises(RequestError, match=r"fails with KeyError: 'self'\. The checkpoint never had self, for"):
        run(*own, "+model.needs=self", path)
    with pytest.raises(RequestError, match=r"Taken\.on_save_checkpoint adds optimizer, which is a key of ours"):
        run(*part("Taken"))


@pytest.mark.parametrize(("raw", "called"), quick_each(2, [("true", "c10d::allreduce_"), ("false", "self.all_gather")]))
def test_a_collective_in_a_validation_step_is_refused_where_ranks_have_uneven_batches(
    raw: str, called: str, run: Run
) -> None:
    gathers = [*part("Gathers"), f"+model.raw={raw}", "data.val_batch_size=4"]
    run(*gathers, "data.val_samples=13", world_size=2)
    with pytest.raises(RequestError, match=f"calls {called}, and with 9 samples in batches of 8 over 2 ranks"):
        run(*gathers, "data.val_samples=9", world_size=2)


def test_what_is_gathered_takes_gradients_back(run: Run, weights: Weights) -> None:
    contrasts = [*part("Contrasts"), "data.global_batch_size=16"]
    one, two = (run(*contrasts, world_size=world_size) for world_size in (1, 2))
    torch.testing.assert_close(weights(two), weights(one), rtol=0, atol=1e-6)


def test_what_has_another_shape_on_another_rank_is_not_gathered(run: Run) -> None:
    with pytest.raises(RunFailed, match=r"all_gather is given \[2, 5\] on rank 0 and \[1, 5\] on rank 1\. Ranks may"):
        run(*part("Contrasts"), "data.global_batch_size=8", "data.num_samples=27", world_size=2)


def test_a_module_that_steps_by_itself_has_the_buffers_of_rank_0_in_each_step(run: Run) -> None:
    """So a run that goes on with what rank 0 has saved ends as the whole one."""
    moving = [*part("Moving"), "trainer.max_epochs=1", "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
    whole = run(*moving, world_size=2)
    middle = Path(whole["run_directory"], "checkpoints", "step_00000002.pt")
    assert run(*moving, f"ckpt_path={middle}", world_size=2)["weights_sha256"] == whole["weights_sha256"]


def test_what_a_module_changes_as_an_epoch_begins_is_changed_once(run: Run) -> None:
    cooling = [*part("Cooling"), "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1", "trainer.max_epochs=2"]
    whole = run(*cooling)
    middle = Path(whole["run_directory"], "checkpoints", "step_00000002.pt")
    parts = run(*cooling, f"ckpt_path={middle}")
    assert parts["weights_sha256"] == whole["weights_sha256"]
    assert parts["metrics"]["temperature"] == whole["metrics"]["temperature"] == 0.25


def test_an_override_for_an_optimizer_that_the_module_brings_is_refused(run: Run) -> None:
    for override in ("optimizer.lr=5", "optimizer=adam", "scheduler=cosine"):
        with pytest.raises(RequestError, match=f"{override}: Lit brings its own optimizer and scheduler"):
            run(override, *LIT)


def test_a_module_without_training_step_is_refused(run: Run) -> None:
    with pytest.raises(RequestError, match="needs a module with training_step, and Toy has none"):
        run("task=lightning")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("StochasticWeightAveraging", "callbacks=ema"),
        ("WeightAveraging", "callbacks=ema"),
        ("GradientAccumulationScheduler", "callbacks=gradient_accumulation"),
        ("LearningRateFinder", "tune=lr"),
        ("BatchSizeFinder", "tune=batch_size"),
    ],
)
def test_a_callback_of_lightnings_own_loop_is_refused_with_what_there_is_instead(name: str, instead: str) -> None:
    made = type(name, (), {"__module__": "lightning.pytorch.callbacks"})()
    with pytest.raises(RequestError, match=f"callbacks.own is Lightning's {name}, .* Use {instead} instead"):
        refuse_callback("own", made)
