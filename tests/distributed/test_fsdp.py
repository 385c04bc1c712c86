"""``strategy=fsdp``: the bits of ``ddp_exact``, each rank with a part of the model."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.strategies.fsdp import order
from ddp_recipes.testing import make_job
from helpers.exact import QUIET, RECIPES, all_on_ranks
from helpers.marks import at_night, quick_each, slow_but
from helpers.patience import patience
from helpers.ranks import run_recipe

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

FSDP = ["strategy=fsdp", "strategy.shards=12"]
TOY = "strategy.wrap=[net1,net2]"
TAKEN = {
    "dropout, momentum, clipping, fewer samples than shards at the end": [],
    "adamw, bf16-mixed, accumulation, a last group of which most parts have nothing": [TOY],
    "bf16-true, adamw, batch norm, clipping": [],
    "64-true, adamw, accumulation": [TOY],
    "batch norm, accumulation": [],
    "a layer that nothing uses, weight decay": [TOY],
    "keeping buffers, accumulation, a last batch of which most shards have nothing": [TOY],
    "buffers of all kinds, a parameter that is a number": [TOY],
    "numpy and random in the model and the collate function, validation too": [TOY],
    "random transform, workers, early stopping": [TOY],
}
LEVELS = {1: 1, 2: 1, 3: 2, 4: 3, 6: 2}  # what is dealt, at each world size
REPLICAS = {4: 2, 6: 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "names"), [([4], [*TAKEN][::2]), *at_night(([*LEVELS], [*TAKEN]))], ids=["some sizes", "all"]
)
def test_any_number_of_ranks_and_level_gives_the_bits_of_ddp_exact(
    sizes: list[int], names: list[str], tmp_path: Path
) -> None:
    found: dict[str, list[Summary]] = {name: [] for name in names}
    for size in (0, *sizes):  # at 0 with ddp_exact
        dealt = [f"strategy.level={LEVELS.get(size)}", f"strategy.replicas={REPLICAS.get(size, 1)}"]
        own = ["strategy=ddp_exact"] if size == 0 else [*FSDP, *dealt]
        jobs = {
            name: replace(
                make_job([*QUIET, *own, *RECIPES[name], *(TAKEN[name] if size else [])]),
                directory=tmp_path / f"{name[:4]}_{size}",
            )
            for name in names
        }
        for name, summary in all_on_ranks(jobs, max(1, size)).items():
            found[name].append(summary)
    for name, (exact, *others) in found.items():
        assert [each["world_size"] for each in others] == sizes
        for summary in others:
            where = f"{name} on {summary['world_size']} ranks"
            assert summary["weights_sha256"] == exact["weights_sha256"], where
            for metric in ("train/loss", "train/lr", "train/grad_norm", "train/epoch", "val/loss", "val/mae"):
                assert summary["metrics"][metric] == exact["metrics"][metric], f"{metric} of {where}"
            for count in ("global_step", "epoch", "samples_seen"):
                assert summary[count] == exact[count], where


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it compiles such a model
@pytest.mark.parametrize(
    ("own", "sizes"),
    [
        pytest.param(["model.activation_checkpointing=true"], (1, 4), marks=pytest.mark.slow),
        pytest.param(["callbacks=ema"], (1, 2, 4), marks=pytest.mark.nightly),
        pytest.param(
            ["trainer.compile=true", "trainer.compile_blocks=true", "model.layers=1"], (2,), marks=pytest.mark.nightly
        ),  # compiling takes long
    ],
)
def test_a_transformer_with_a_tied_embedding_has_them_too(
    own: list[str], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question; " * 60)
    small = [
        *("data=text", f"data.path={tmp_path / 'words.txt'}", "data.context=16", "data.val_fraction=0.2"),
        *("data.global_batch_size=12", "model=gpt", "model.layers=2", "model.width=12", "model.heads=2"),
        *(
            "model.dropout=0.1",
            "optimizer=adamw",
            "trainer.max_steps=6",
            "trainer.val_check_interval=6",
            "trainer.log_every_n_steps=1",
        ),
        *("trainer.gradient_clip_val=0.5", "trainer.precision=bf16-mixed", "trainer.progress=false"),
        *("launcher.device=cpu", "logger=none", *own),
    ]
    exact = run_recipe(
        [*small, "strategy=ddp_exact", "strategy.shards=4"], 1, tmp_path / "exact", timeout_s=patience(400)
    )
    for size in sizes:
        fsdp = run_recipe(
            [*small, *FSDP, "strategy.shards=4"], size, tmp_path / f"fsdp_{size}", timeout_s=patience(400)
        )
        assert fsdp["weights_sha256"] == exact["weights_sha256"], f"{size} ranks"
        assert fsdp["metrics"]["val/loss"] == exact["metrics"]["val/loss"]


@pytest.mark.nightly
@pytest.mark.spawn
def test_a_part_of_the_table_of_hashes() -> None:
    """Of all strategies and levels, with replicas, after a resume of another strategy."""
    command = [sys.executable, "-m", "benchmarks.hashes", "--ranks=4"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert printed.returncode == 0, printed.stdout + printed.stderr
    _, _, *rows = printed.stdout.strip().splitlines()
    assert len(rows) == 5


# --- from one strategy to another ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_at_any_other_world_size_and_strategy(tmp_path: Path, run: Run) -> None:
    overrides = [
        *QUIET,
        "checkpoint=default",
        "data.num_samples=89",
        "model._target_=own_parts.Dropout",
        "optimizer=adamw",
        "scheduler=cosine",
        "scheduler.T_max=12",
        "trainer.max_epochs=3",
        "trainer.gradient_clip_val=0.5",
        "ckpt_path=auto",
    ]
    exact = ["strategy=ddp_exact"]
    whole = run(*overrides, *exact)
    for own, size, steps in [(FSDP, 2, 2), (exact, 3, 5), (FSDP, 3, 8), (FSDP, 1, 10), (FSDP, 4, 11), (exact, 1, 12)]:
        limit = f"trainer.max_steps={steps}"
        moved = run(*overrides, *own, limit, world_size=size, directory=tmp_path / "moved")
        assert (moved["world_size"], moved["global_step"]) == (size, steps)
    assert moved["weights_sha256"] == whole["weights_sha256"]
    assert moved["metrics"]["val/loss"] == whole["metrics"]["val/loss"]


@pytest.mark.slow
def test_without_shards_it_learns_what_ddp_learns(run: Run, weights: Weights) -> None:
    overrides = [*QUIET, "checkpoint=default", "data.num_samples=61", "data.batch_size=2"]
    overrides += ["model._target_=exact_parts.Scaled"]  # has a parameter that is a number
    overrides += ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.1", "data.val_samples=7"]
    ddp = run(*overrides, "strategy=ddp", world_size=2)
    for own, size in ((["strategy.level=3"], 2), (["strategy.level=1"], 2), (["strategy.replicas=2"], 4)):
        batch = f"data.batch_size={4 // size}"
        fsdp = run(*overrides, "strategy=fsdp", TOY, *own, batch, world_size=size)
        torch.testing.assert_close(weights(fsdp), weights(ddp), rtol=0, atol=1e-6)
        for metric in ("train/loss", "train/grad_norm", "val/loss", "val/mae"):
            assert fsdp["metrics"][metric] == pytest.approx(ddp["metrics"][metric], rel=1e-4)


@pytest.mark.slow
def test_predictions_and_evaluation_do_not_depend_on_the_number_of_ranks(run: Run, tmp_path: Path) -> None:
    small = [*QUIET, "checkpoint=default", "model._target_=own_parts.Norm", *FSDP]
    trained = run(*small, "data.num_samples=24", "data.batch_size=3", "trainer.max_epochs=1")["last_checkpoint"]
    predicted, losses = [], []
    for size in (1, 3):
        folder = tmp_path / f"predicted_{size}"
        run(*small, "mode=predict", f"ckpt_path={trained}", world_size=size, directory=folder)
        predicted.append(torch.load(folder / "predictions.pt", weights_only=True))
        tested = run(
            *small, "mode=validate", f"ckpt_path={trained}", world_size=size, directory=tmp_path / f"val_{size}"
        )
        losses.append(tested["metrics"])
    assert predicted[0].shape == (21, 5)
    assert torch.equal(*predicted)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("own", quick_each(3, [[], ["strategy.shards=4"], ["trainer.accumulate_grad_batches=2"]]))
def test_it_does_what_one_process_does(own: list[str], run: Run) -> None:
    model = "model._target_=exact_parts.Scaled"
    checked = [
        "check=equivalence",
        model,
        "data.num_samples=60",
        "data.batch_size=4",
        "trainer.gradient_clip_val=0.1",
        *own,
    ]
    metrics = run(*QUIET, "strategy=fsdp", TOY, *checked, world_size=2)["metrics"]
    assert 0 < metrics["check/gradient"] < 1e-5
    assert metrics["check/parameter"] < 1e-5


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"strategy.wrap=auto takes the elements of nn.Sequential and nn.ModuleList, and Toy has none"),
        (["strategy.wrap=[nett1]"], r"strategy.wrap: nett1 matches no module.* Did you mean 'net1'"),
        (["strategy.level=4", TOY], r"strategy.level=4 is not known. Allowed: 3, 2, 1"),
        (["strategy.replicas=2", TOY], r"strategy.replicas=2 share the processes evenly, two or more each"),
        (["strategy.shards=7", TOY], r"strategy.shards=7 cannot be dealt evenly to 2 processes"),
        (["model.num_devices=2", TOY], r"model.num_devices=2 does not go with strategy=fsdp"),
        (["tune=batch_size", TOY], r"tries passes of one process, .* and strategy=fsdp runs one on several, which"),
        (["model._target_=exact_parts.Tied", TOY], r"net1.weight and net2.weight are one parameter, of two blocks"),
        (["optimizer._target_=exact_parts.Normed", TOY], r"Normed may look at all of it"),
        (
            ["model._target_=exact_parts.Transposed", TOY],
            r"net1.weight does not lie in memory in the order of its \[10, 10",
        ),
        (["model._target_=exact_parts.Empty", TOY], r"nothing has no numbers: its shape is \[0, 4\]"),
        (["model._target_=exact_parts.Late", TOY], r"net1.weight has a hook of register_post_accumulate_grad_hook"),
        (["model._target_=exact_parts.Told", TOY], r"net1.weight is a Known, and FSDP2 puts an nn.Parameter in its"),
        (["model._target_=exact_parts.Sparse", TOY], r"reduces dense gradients, but those of words are sparse"),
        (["strategy.shards=2", "optimizer.fused=true", TOY], r"bits depend on how a parameter is dealt"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: list[str], message: str, run: Run) -> None:
    with pytest.raises(RequestError, match=message):
        run(*QUIET, "strategy=fsdp", *overrides, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_layer_that_only_some_shards_use_ends_the_run_by_name(world_size: int, run: Run) -> None:
    model = ["data.num_samples=61", "model._target_=exact_parts.Sometimes", TOY]
    with pytest.raises(Exception, match=r"Some shards of a batch use rare.bias, rare.weight of the model, and others"):
        run(*QUIET, *FSDP, *model, world_size=world_size)


# --- what blocks may be ----------------------------------------------------------------------------------------------

SMALL = ["data.num_samples=41", "data.global_batch_size=12"]
BLOCKS = {
    "Shared": "called again and again",
    "Repeated": "called with what they gave",
    "Pyramid": "one head over several levels",
    "Partly": "called twice, for another part of it each time",
    "SharedAndChecked": "called again, activations computed again",
    "Attending": "attention, whose query is its key",
    "EncoderDecoder": "that use a tensor several times which others use, too",
    "Nested": "blocks in blocks, with such a tensor",
    "Codebook": "that return their own parameters",
    "LateHead": "used from the fourth step on",
    "Hooked": "with a hook of a parameter's gradient",
    "LookedUp": "that look up their class",
    "Vectorised": "called within a transform of torch.func",
}
AWKWARD = {
    "Constant": "returns a parameter of its own",
    "Highest": "a buffer that starts at minus infinity",
    "Kinds": "buffers of many dtypes",
    "Eights": "a buffer of 8-bit floats",
}


@pytest.mark.parametrize(
    ("name", "level"),
    slow_but(
        [("Shared", 3)], [(name, level) for name in BLOCKS for level in (1, 2, 3)], [(name, 3) for name in BLOCKS]
    ),
)
def test_blocks_of_all_kinds_give_the_bits_of_ddp_exact(name: str, level: int, run: Run) -> None:
    model = [*QUIET, *SMALL, f"model._target_=differential.architectures.{name}", "strategy.shards=6"]
    exact = run(*model, "strategy=ddp_exact")
    fsdp = run(*model, "strategy=fsdp", f"strategy.level={level}", world_size=2)
    assert fsdp["weights_sha256"] == exact["weights_sha256"]
    assert fsdp["metrics"]["val/loss"] == exact["metrics"]["val/loss"]


def test_a_block_is_given_back_before_another_one_is_gathered(run: Run) -> None:
    model = ["model._target_=own_blocks.Sparing", "~model.hidden_features"]
    run(*QUIET, *SMALL, *model, "strategy=fsdp", "trainer.max_steps=2", world_size=2)


@pytest.mark.parametrize("wrap", slow_but([], [30, 64, 150], daily=[30]))
def test_a_transformer_that_is_cut_at_a_number_of_parameters_gives_them_too(wrap: int, run: Run) -> None:
    """Into its projections, its attention and the rest of a layer, or its layers."""
    model = [*QUIET, *SMALL, "model._target_=differential.architectures.VisionTransformer", "strategy.shards=6"]
    fsdp = run(*model, "strategy=fsdp", f"strategy.wrap={wrap}", world_size=2)
    assert fsdp["weights_sha256"] == run(*model, "strategy=ddp_exact")["weights_sha256"]


@pytest.mark.parametrize("optimizer", ["tagged_sgd", "sized_sgd"])
def test_what_tells_parameters_apart_is_there_in_a_step_and_for_an_optimizer(optimizer: str, run: Run) -> None:
    """Attributes, as Mamba's and S4's have them for their learning rate and weight decay, and sizes."""
    model = [*QUIET, *SMALL, "model._target_=differential.architectures.Tagged", "strategy.shards=6"]
    model += [f"optimizer._target_=differential.architectures.{optimizer}", "optimizer.lr=0.01"]
    fsdp = run(*model, "strategy=fsdp", world_size=2)
    assert fsdp["weights_sha256"] == run(*model, "strategy=ddp_exact")["weights_sha256"]


@pytest.mark.parametrize("name", slow_but(["NeverCalled"], ["Borrowing", "NeverCalled"]))
def test_a_part_that_is_never_called_is_gathered_with_the_module_that_reads_it(name: str, run: Run) -> None:
    """As the projections of Swin and BEiT, whose weights their attention gives to a function."""
    model = [*QUIET, *SMALL, f"model._target_=differential.architectures.{name}", "strategy.shards=6"]
    fsdp = run(*model, "strategy=fsdp", "strategy.wrap=200", world_size=2)
    assert fsdp["weights_sha256"] == run(*model, "strategy=ddp_exact")["weights_sha256"]


@pytest.mark.parametrize("name", slow_but(["Highest"], AWKWARD))
def test_awkward_models_give_them_too(name: str, run: Run) -> None:
    model = [*QUIET, *SMALL, f"model._target_=differential.architectures.{name}", "strategy.shards=6"]
    exact = run(*model, "strategy=ddp_exact")
    fsdp = run(*model, "strategy=fsdp", "strategy.wrap=[start,head]", world_size=2)
    assert fsdp["weights_sha256"] == exact["weights_sha256"]
    assert fsdp["metrics"]["val/loss"] == exact["metrics"]["val/loss"] < 2


def test_a_transformer_of_torch_is_evaluated_alike_in_mixed_precision(run: Run) -> None:
    """Kernels that are only for evaluations give other numbers, and failed on several ranks."""
    model = [*QUIET, *SMALL, "model._target_=differential.architectures.Encoder", "trainer.precision=bf16-mixed"]
    one, two = (run(*model, "strategy=ddp_exact", "strategy.shards=6", world_size=size) for size in (1, 2))
    fsdp = run(*model, "strategy=fsdp", "strategy.shards=6", world_size=2)
    assert one["metrics"]["val/loss"] == two["metrics"]["val/loss"] == fsdp["metrics"]["val/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [[], ["strategy.shards=6"]])
@pytest.mark.parametrize("name", ["Shuffled", "StochasticDepth", "RoutedExperts"])
def test_blocks_in_an_order_of_each_rank_end_the_run_by_name(name: str, shards: list[str], run: Run) -> None:
    model = [*QUIET, *SMALL, f"model._target_=differential.architectures.{name}", *shards]
    with pytest.raises(
        RunFailed, match=r"had (gathered|reduced) \S+, where .* run the blocks of the model in one order"
    ):
        run(*model, "strategy=fsdp", world_size=2)


@pytest.mark.parametrize(
    ("model", "wrap", "level"),
    [
        ("InnerGradient", "energy", 3),
        *at_night(("InnerGradient", "start,head", 1), ("Unrolled", "energy", 2)),
        *at_night(("Unrolled", "'energy.0','energy.2'", 3), ("Adapted", "start", 3)),
        *at_night(("InnerTransform", "'energy.0','energy.2'", 3)),
    ],
)
@pytest.mark.parametrize("world_size", [1, *at_night(2)])
def test_a_gradient_within_the_forward_pass_leaves_the_bits(
    model: str, wrap: str, level: int, world_size: int, run: Run
) -> None:
    own = [*QUIET, *SMALL, f"model._target_=differential.architectures.{model}", "strategy.shards=6"]
    exact = run(*own, "strategy=ddp_exact")
    fsdp = run(*own, "strategy=fsdp", f"strategy.wrap=[{wrap}]", f"strategy.level={level}", world_size=world_size)
    assert fsdp["weights_sha256"] == exact["weights_sha256"]
    assert fsdp["metrics"]["val/loss"] == exact["metrics"]["val/loss"]


@pytest.mark.parametrize(
    "model", slow_but([[]], [[], ["model._target_=own_chains.Checkpointed", "~model.hidden_features"]])
)
def test_a_penalty_on_gradients_leaves_the_bits(model: list[str], run: Run) -> None:
    """With checkpoints of torch's a block is computed several times, and not to its end."""
    own = [*QUIET, *SMALL, *model, "strategy.shards=6", "task._target_=own_chains.Penalty"]
    fsdp = run(*own, "strategy=fsdp", "strategy.wrap=64")
    assert fsdp["weights_sha256"] == run(*own, "strategy=ddp_exact")["weights_sha256"]


@pytest.mark.slow
def test_a_block_that_is_called_once_more_after_such_a_gradient_ends_the_run_by_name(run: Run) -> None:
    model = [
        *QUIET,
        *SMALL,
        "model._target_=differential.architectures.CalledAgain",
        "strategy=fsdp",
        "strategy.wrap=[energy]",
    ]
    with pytest.raises(RunFailed, match=r"gradient was taken through it .* Choose strategy.level=2"):
        run(*model)
    run(*model, "strategy.level=2")


@pytest.mark.parametrize("world_size", [1, *at_night(2)])
def test_a_block_that_is_called_with_other_parameters_ends_the_run_by_name(world_size: int, run: Run) -> None:
    """It would be computed with its own: FSDP2 puts these in their place."""
    model = [*QUIET, *SMALL, "model._target_=differential.architectures.Functional"]
    with pytest.raises(RunFailed, match=r"Sequential is called with another weight in the place of its parameter"):
        run(*model, "strategy=fsdp", world_size=world_size)


@pytest.mark.parametrize("world_size", [1, *at_night(2)])
@pytest.mark.parametrize("name", ["Adapted", "AdaptedIfUsed"])
def test_a_step_on_a_blocks_parameters_within_a_step_ends_the_run_by_name(name: str, world_size: int, run: Run) -> None:
    model = [*QUIET, *SMALL, f"model._target_=differential.architectures.{name}"]
    with pytest.raises(RunFailed, match=r"gradient of a parameter .* \(MAML, .* choose strategy=ddp"):
        run(*model, "strategy=fsdp", world_size=world_size)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [[], *at_night(["strategy.shards=6"])])
def test_a_rank_that_leaves_the_order_says_so(shards: list[str], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in the block that comes next to them."""
    monkeypatch.setattr(order, "_PATIENCE_S", patience(2))
    model = [*QUIET, *SMALL, "model._target_=exact_parts.TurnsRound", *shards]
    with pytest.raises(RunFailed, match=r"Rank 1 had gathered blocks.1, where all had gathered blocks.0 before"):
        run(*model, "strategy=fsdp", world_size=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which Dynamo looks at
def test_a_part_that_a_model_compiles_by_itself_is_traced_without_warnings(run: Run) -> None:
    compiled = [*QUIET, "model._target_=own_parts.CompiledInside"]
    fsdp = run(*compiled, "strategy=fsdp", world_size=2)
    assert fsdp["metrics"]["val/loss"] == pytest.approx(run(*compiled, world_size=2)["metrics"]["val/loss"], rel=1e-6)
