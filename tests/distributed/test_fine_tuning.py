"""Where a run starts from and what of a model it trains: weights of elsewhere, freezing, parameter groups."""

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_recipes.build.parameters import grouped
from ddp_recipes.checkpointing.export import export
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.models import MLP
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.tasks import Task
from helpers.marks import at_night, needs, slow_but
from helpers.patience import patience

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Tensor]]

STANDING = ["optimizer.lr=0", "trainer.max_steps=1"]  # a run that ends with the weights that it starts from
MLP_ = ["model=mlp", "model.hidden_features=[6,5]"]
NO_DECAY = ["optimizer=adamw", "optimizer.weight_decay=0.5"]
GROUPS = [*NO_DECAY, "+optimizer.groups.bias={params: '*.bias', weight_decay: 0, lr: 0.002}"]


def log_of(summary: Summary) -> str:
    """Return what a run has logged."""
    return (Path(summary["run_directory"]) / "train.log").read_text()


# --- weights_from ----------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(run: Run) -> Summary:
    """A run whose weights others start from."""
    return run("seed=7", "trainer.max_epochs=1", "strategy=single")


def test_each_kind_of_file_gives_the_weights(trained: Summary, run: Run, weights: Weights, tmp_path: Path) -> None:
    found = weights(trained)
    lightning = {
        "epoch": 1,
        "pytorch-lightning_version": "2.6.1",
        "state_dict": {**{f"net.{name}": value for name, value in found.items()}, "loss.weight": torch.ones(2)},
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save(lightning, tmp_path / "lightning.ckpt")
    torch.save(found, tmp_path / "plain.pt")
    torch.save({f"module.{name}": value for name, value in found.items()}, tmp_path / "ddp.pth")
    export(trained["run_directory"], tmp_path / "model.safetensors")
    files = [
        *(path for path in tmp_path.iterdir() if path.is_file()),
        trained["run_directory"],
        trained["best_checkpoint"],
    ]
    assert len(files) == 6
    for file in files:
        summary = run(*STANDING, f"weights_from={file}", "strategy=single")
        assert summary["weights_sha256"] == trained["weights_sha256"], file
        assert summary["samples_seen"] == 8
        assert ("weights_from=" in log_of(summary)) == (file == tmp_path / "lightning.ckpt")


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    slow_but([("ddp_pipeline", 2)], [("ddp", 2), ("ddp_exact", 2), ("ddp_pipeline", 2), ("parameter_server", 3)]),
)
def test_any_strategy_starts_from_them(trained: Summary, strategy: str, world_size: int, run: Run) -> None:
    path = trained["last_checkpoint"]
    summary = run(*STANDING, f"weights_from={path}", f"strategy={strategy}", world_size=world_size)
    assert summary["weights_sha256"] == trained["weights_sha256"]


def test_what_does_not_match_is_said(trained: Summary, run: Run, weights: Weights) -> None:
    summary = run(*STANDING, "strategy=single", f"weights_from={trained['run_directory']}", "data.out_features=3")
    assert "2 of the model's 4 tensors are taken." in log_of(summary)
    assert "2 of another shape: net2.weight [5, 10] for [3, 10], net2.bias [5] for [3]" in log_of(summary)
    assert torch.equal(weights(summary)["net1.weight"], weights(trained)["net1.weight"])


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), *at_night(("ddp", 2), ("ddp_exact", 2))])
def test_what_takes_the_shape_of_what_it_loads_is_taken(
    strategy: str, world_size: int, run: Run, weights: Weights
) -> None:
    """Observers of quantisation, of each channel, have no shape before they have seen a batch."""
    model = ["model._target_=differential.architectures.Observed"]
    trained = run(*model, "seed=7", "trainer.max_steps=2", "strategy=single")
    assert weights(trained)["observer.min_val"].shape == (16,)
    own = [*model, f"strategy={strategy}", f"weights_from={trained['run_directory']}"]
    summary = run(*own, "mode=validate", world_size=world_size)
    assert "weights_from=" not in log_of(summary)
    assert summary["weights_sha256"] == trained["weights_sha256"]


def test_a_restart_goes_on_and_does_not_begin_from_them_again(trained: Summary, run: Run, tmp_path: Path) -> None:
    overrides = ["strategy=single", f"weights_from={trained['run_directory']}", "ckpt_path=auto"]
    whole = run(*overrides)
    run(*overrides, "trainer.max_steps=3", directory=tmp_path / "stopped")
    assert run(*overrides, directory=tmp_path / "stopped")["weights_sha256"] == whole["weights_sha256"]
    assert whole["weights_sha256"] != run("strategy=single")["weights_sha256"]


def test_evaluating_and_exporting_take_them(trained: Summary, run: Run) -> None:
    weights_from = f"weights_from={trained['last_checkpoint']}"
    assert run("mode=validate", "seed=7", weights_from)["metrics"]["val/loss"] == pytest.approx(
        trained["metrics"]["val/loss"]
    )
    assert run("mode=export", weights_from)["weights_sha256"] == trained["weights_sha256"]


class Opaque:
    """What is neither a tensor nor plain data."""


def test_what_is_no_start_is_refused_and_nothing_is_written(trained: Summary, run: Run, tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "made_by": Opaque()}, tmp_path / "opaque.ckpt")
    torch.save({"other.weight": torch.ones(2)}, tmp_path / "other.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({f"{name}.net1.bias": torch.ones(10) for name in ("net", "model")}, tmp_path / "both.pt")
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
    cases = {
        "weights_from=nowhere": "there is no .*nowhere. Allowed: a run directory",
        f"weights_from={tmp_path / 'opaque.ckpt'}": "it names .*Opaque.*never run",
        f"weights_from={tmp_path / 'other.pt'}": "nothing in it matches the model.\n.*4 not in the file: net1.weight",
        f"weights_from={tmp_path / 'list.pt'}": "holds a list, no state dict",
        f"weights_from={tmp_path / 'both.pt'}": "which one is meant is not known",
        f"weights_from={tmp_path / 'damaged.safetensors'}": "is no whole safetensors file",
        f"weights_from={trained['run_directory']} ckpt_path=last": "a run that resumes has the checkpoint's weights",
        f"weights_from={trained['run_directory']} plan=true": "leave out weights_from",
    }
    for overrides, message in cases.items():
        with pytest.raises(RequestError, match=message):
            run(*overrides.split(), directory=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


LIGHTNING = """
import sys
import torch
import lightning

class Module(lightning.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Sequential()
        self.model.add_module("net1", torch.nn.Linear(10, width))
        self.model.add_module("net2", torch.nn.Linear(width, 5))

    def training_step(self, batch):
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

module = Module(10)
trainer = lightning.Trainer(max_steps=1, logger=False, accelerator="cpu", enable_checkpointing=False)
trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 10))))
trainer.save_checkpoint("theirs.ckpt")
torch.save(module.model.state_dict(), "plain.pt")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_a_checkpoint_that_lightning_wrote(run: Run, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHTNING], cwd=tmp_path, capture_output=True, text=True, timeout=patience(120)
    )
    assert done.returncode == 0, done.stderr
    found = [
        run(*STANDING, f"weights_from={tmp_path / name}", "strategy=single") for name in ("theirs.ckpt", "plain.pt")
    ]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


# --- freezing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    slow_but([("ddp", 2)], [("single", 1), ("ddp", 2), ("ddp_exact", 2), ("ddp_pipeline", 2), ("parameter_server", 3)]),
)
@pytest.mark.parametrize("pattern", ["net1", *at_night("net2.*"), "[net1.weight,'*2.bias']"])
def test_what_is_frozen_stays(pattern: str, strategy: str, world_size: int, run: Run, weights: Weights) -> None:
    overrides = [f"strategy={strategy}", f"model.freeze={pattern}", "optimizer.weight_decay=0.1"]
    before = weights(run(*overrides, *STANDING, world_size=world_size))
    after = weights(run(*overrides, world_size=world_size))
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    frozen = {"net1": {"net1.weight", "net1.bias"}, "net2.*": {"net2.weight", "net2.bias"}}
    assert same == frozen.get(pattern, {"net1.weight", "net2.bias"})


THAWING = ["model._target_=own_parts.Thawing", "data.global_batch_size=12"]
THAWED = [*THAWING, "+callbacks.thaws._target_=own_parts.Thaws"]


@pytest.mark.parametrize(
    ("strategy", "world_size"), slow_but([("ddp", 2)], [("ddp", 2), ("ddp", 3), ("parameter_server", 3)])
)
def test_what_a_callback_unfreezes_is_trained_by_all_ranks(
    strategy: str, world_size: int, run: Run, weights: Weights
) -> None:
    one = weights(run(*THAWED, "strategy=single"))
    found = weights(run(*THAWED, f"strategy={strategy}", world_size=world_size))
    torch.testing.assert_close(found, one, rtol=0, atol=1e-6)
    assert not torch.equal(one["net1.weight"], weights(run(*THAWING, "strategy=single"))["net1.weight"])


def test_what_a_callback_unfreezes_has_the_same_bits_at_any_world_size(run: Run) -> None:
    exact = [*THAWED, "strategy=ddp_exact", "strategy.shards=6"]
    found = [run(*exact, world_size=size) for size in (1, 2)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_unfrozen_stays_so_in_a_run_that_goes_on(world_size: int, run: Run, tmp_path: Path) -> None:
    once = [*THAWED, "+callbacks.thaws.once=true", "trainer.max_epochs=4", "trainer.val_check_interval=1.0"]
    whole = run(*once, world_size=world_size)
    for number, epochs in enumerate((2, 3, 4)):
        again = [f"trainer.max_epochs={epochs}", *["ckpt_path=auto"] * bool(number)]
        parts = run(*once, *again, directory=tmp_path / "parts", world_size=world_size)
    assert parts["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("strategy", ["fsdp", *at_night("ddp_pipeline")])
def test_unfreezing_ends_a_run_whose_ranks_have_parts_of_the_model(strategy: str, run: Run) -> None:
    own = ["strategy=fsdp", "strategy.wrap=[net1,net2]"] if strategy == "fsdp" else [f"strategy={strategy}"]
    with pytest.raises(RunFailed, match=r"freezes other parameters than at the start, and with strategy=\w+ what"):
        run(*THAWED, *own, world_size=2)


@pytest.mark.parametrize("strategy", ["ddp_exact", *at_night("ddp")])
def test_a_forward_pass_that_unfreezes_ends_the_run_by_name(strategy: str, run: Run) -> None:
    with pytest.raises(RunFailed, match=r"net1.weight was frozen as a step began, and is trained now"):
        run(*THAWING, "+model.step=2", f"strategy={strategy}", world_size=2)


# --- parameter groups ------------------------------------------------------------------------------------------------


def groups_of(summary: Summary) -> dict[str, Any]:
    """Return the parameter groups in the last checkpoint of a run by their names."""
    groups = load(Path(summary["last_checkpoint"]))["optimizer"]["param_groups"]
    return {group["name"]: group for group in groups}


@pytest.mark.slow
def test_a_group_trains_as_it_says_and_resumes_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    overrides = [*GROUPS, "scheduler=cosine", "checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
    whole = run(*overrides, world_size=2)
    groups = groups_of(whole)
    assert {name: group["param_names"] for name, group in groups.items()} == {
        "rest": ["net1.weight", "net2.weight"],
        "bias": ["net1.bias", "net2.bias"],
    }
    assert [groups[name]["weight_decay"] for name in ("rest", "bias")] == [0.5, 0]
    assert [groups[name]["initial_lr"] for name in ("rest", "bias")] == [0.001, 0.002]
    path = Path(whole["run_directory"]) / "checkpoints" / "step_00000003.pt"
    assert run(*overrides, f"ckpt_path={path}", world_size=2)["weights_sha256"] == whole["weights_sha256"]
    assert run(*overrides, "callbacks=lr_monitor", "trainer.log_every_n_steps=1")["metrics"]["lr/bias"] > 0
    swapped = [*NO_DECAY, "+optimizer.groups.bias={params: '*.weight'}"]
    for changed, message in (
        (NO_DECAY, r"with the parameter groups rest \(2\), bias \(2\), this run has 0 \(4\)"),
        (swapped, "with the parameter net1.weight in rest, this run has net1.weight in bias|groups rest"),
    ):
        with pytest.raises(RequestError, match=message):
            run(*changed, "scheduler=cosine", f"ckpt_path={path}", world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 2), ("ddp_pipeline", 2), ("parameter_server", 3)])
def test_groups_train_as_in_one_process(strategy: str, world_size: int, run: Run, weights: Weights) -> None:
    size = [*GROUPS, "data.global_batch_size=16"]
    alone, several = (
        weights(run(*size, f"strategy={name}", world_size=count))
        for name, count in (("single", 1), (strategy, world_size))
    )
    for name, value in alone.items():
        torch.testing.assert_close(several[name], value)


def test_rates_fall_from_layer_to_layer(run: Run) -> None:
    decayed = ["strategy=single", *MLP_, "optimizer.layer_decay=0.5", "optimizer.lr=0.4", "trainer.max_epochs=1"]
    groups = groups_of(run(*decayed))
    assert {name: (group["lr"], group["param_names"]) for name, group in groups.items()} == {
        "layer_0": (0.1, ["layers.0.weight", "layers.0.bias"]),
        "layer_1": (0.2, ["layers.2.weight", "layers.2.bias"]),
        "layer_2": (0.4, ["layers.4.weight", "layers.4.bias"]),
    }
    both = run(*decayed, "+optimizer.groups.bias={params: '*.bias', lr: 0.8}", "scheduler=one_cycle")
    highest = {name: group["max_lr"] for name, group in groups_of(both).items()}
    assert highest["rest.layer_0"] == pytest.approx(0.1)
    assert highest["bias.layer_1"] == pytest.approx(0.4)


def test_a_layer_is_an_element_of_a_list_or_a_child() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.ones(2))
            self.embed = nn.Linear(2, 2)
            self.body = nn.Module()
            self.body.blocks = nn.ModuleList([MLP(2, [3], 2), nn.ReLU(), MLP(2, [3], 2)])
            self.head = nn.Linear(2, 2)

    names = {"optimizer": {"lr": 1.0, "layer_decay": 0.1}}
    groups = grouped(names["optimizer"], Task(Blocks(), nn.Identity()))
    assert [(group["name"], len(group["params"])) for group in groups] == [
        ("layer_0", 3),
        ("layer_1", 4),
        ("layer_2", 4),
        ("layer_3", 2),
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.freeze=[net3]",
            "model.freeze: net3 matches no parameter.*Did you mean 'net2'.*first names: net1.weight",
        ),
        ("model.freeze='*'", "leaves no parameter of the model to train"),
        ("+optimizer.groups.a={params: net1.wieght}", "a.params: net1.wieght matches no.*Did you mean 'net1.weight'"),
        ("+optimizer.groups={a: {params: net1}, b: {params: '*.bias'}}", "net1.bias is in two groups"),
        ("+optimizer.groups.a={params: net1, weight_decai: 0}", "a.weight_decai: .*Did you mean 'weight_decay'"),
        ("+optimizer.groups.a={params: net1, lr: fast}", "a.lr=fast is not allowed. Allowed: a number"),
        ("+optimizer.groups.a={lr: 1}", "is no group. Give params"),
        ("optimizer.layer_decay=2", "layer_decay=2 is not allowed"),
    ],
)
def test_a_pattern_or_group_that_cannot_be_is_refused(override: str, message: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        run(override, "strategy=single", directory=tmp_path / "refused")
    assert not [path for path in (tmp_path / "refused").rglob("*") if path.stat().st_size]  # an empty lock at most


# --- resuming --------------------------------------------------------------------------------------------------------


def test_the_schedule_of_the_checkpoint_goes_on_and_another_is_refused(run: Run) -> None:
    first = run("strategy=single", "scheduler=step", "trainer.max_epochs=1")
    resumes = ["strategy=single", f"ckpt_path={first['run_directory']}"]
    changed = run(*resumes, "scheduler=step", "scheduler.gamma=0.5")
    assert "scheduler.gamma=0.5 is not taken: the run resumes with the checkpoint's 0.1." in log_of(changed)
    for other in (["scheduler=cosine"], ["scheduler=step", "scheduler.interval=step"]):
        with pytest.raises(RequestError, match=r"with the scheduler StepLR by epoch, this run has .* by step"):
            run(*resumes, *other)


# --- a learning rate to begin with -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_learning_rate_is_found_alike_on_any_number_of_ranks(run: Run) -> None:
    overrides = ["tune=lr", "data.num_samples=320", "data.global_batch_size=32"]
    alone, several = (run(*overrides, world_size=size) for size in (1, 2))
    found = alone["metrics"]["tune/lr"]
    assert found == several["metrics"]["tune/lr"]
    assert 0.001 < found < 10
    assert f"The loss falls fastest at optimizer.lr={found:.2g}" in log_of(alone)
    if find_spec("matplotlib") is not None:
        assert (Path(several["run_directory"]) / "lr_finder.png").read_bytes().startswith(b"\x89PNG")
    assert not (Path(several["run_directory"]) / "checkpoints").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ckpt_path=auto"], "leave out check and ckpt_path"),
        (["mode=validate"], "use mode=fit"),
        (["plan=true"], "leave out tune=lr"),
        (["tune_steps=10"], "Allowed: 20 or more"),
        (["optimizer.lr=0"], "looks for optimizer.lr, which is 0"),
        (["callbacks=gradient_accumulation", "callbacks.gradient_accumulation.schedule={1: 2}"], "Leave that callback"),
    ],
)
def test_what_does_not_go_with_tuning_is_refused(overrides: list[str], message: str, run: Run) -> None:
    with pytest.raises(RequestError, match=message):
        run("tune=lr", "strategy=single", *overrides)


# --- a batch that fits -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_largest_batches_are_left_out_where_one_rank_has_no_memory_for_them(run: Run, weights: Weights) -> None:
    wide = ["model._target_=own_parts.Wide", "data.num_samples=300", "data.global_batch_size=256"]
    small = ["model.hidden_features=10", "optimizer.lr=1e-6"]
    found = run("tune=batch_size", "tune_steps=1", "+model.more=100", *wide, *small, world_size=2, warm=False)
    assert "data.global_batch_size=256 trainer.accumulate_grad_batches=1: out of memory on rank 1" in log_of(found)
    batch, passes = (int(found["metrics"][f"tune/{key}"]) for key in ("global_batch_size", "accumulate_grad_batches"))
    assert batch * passes == 256 > batch
    assert not (Path(found["run_directory"]) / "checkpoints").exists()
    cut = [f"data.global_batch_size={batch}", f"trainer.accumulate_grad_batches={passes}"]
    as_found, whole = run(*wide, *cut, *small, world_size=2, warm=False), run(*wide, *small)
    assert as_found["global_step"] == whole["global_step"] == 4
    torch.testing.assert_close(weights(as_found), weights(whole), rtol=0, atol=1e-6)


def test_an_epoch_keeps_its_length_where_batches_are_counted_or_dropped(run: Run) -> None:
    for shortened in ("data.drop_last=true", "trainer.limit_train_batches=2"):
        found = run("tune=batch_size", "tune_steps=1", "data.num_samples=90", "data.global_batch_size=32", shortened)
        whole, halves, *_ = [line for line in log_of(found).splitlines() if "s a step" in line]
        assert "data.global_batch_size=32 trainer.accumulate_grad_batches=1: " in whole
        assert "=16 trainer.accumulate_grad_batches=2 trainer.limit_train_batches=4: " in halves


def test_batches_too_small_for_the_model_end_the_search(run: Run) -> None:
    norm = ["tune=batch_size", "tune_steps=1", "model._target_=own_parts.Norm"]
    found = run(*norm, "data.global_batch_size=2")
    assert found["metrics"]["tune/global_batch_size"] == 2
    assert "data.global_batch_size=1 trainer.accumulate_grad_batches=2: the model fails, on rank 0" in log_of(found)
    with pytest.raises(RuntimeError, match="ValueError: Expected more than 1 value per channel"):
        run(*norm, "data.global_batch_size=1")


@needs("lightning")
def test_a_batch_size_is_not_tuned_where_a_module_steps_itself(run: Run) -> None:
    with pytest.raises(RequestError, match=r"Manual takes its optimizer steps itself"):
        run("tune=batch_size", "model._target_=lightning_parts.Manual", "task=lightning")


@pytest.mark.slow
def test_a_batch_size_is_not_tuned_where_micro_batches_cut_it(run: Run) -> None:
    with pytest.raises(RequestError, match=r"cuts a pass into micro-batches"):
        run("tune=batch_size", "strategy=ddp_pipeline", "model=mlp", world_size=2)
    with pytest.raises(RequestError, match=r"tune=batch_size does not go with strategy=parameter_server"):
        run("tune=batch_size", "strategy=parameter_server", world_size=2)
