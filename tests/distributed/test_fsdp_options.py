"""What ``strategy=fsdp`` can be told: blocks by size, what they are gathered in."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.models import GPT
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.strategies.fsdp.blocks import blocks_of
from helpers.exact import QUIET
from helpers.marks import slow_but
from helpers.ranks import run_recipe

Run = Callable[..., Summary]

FSDP = ["strategy=fsdp", "strategy.shards=6"]
TOY = "strategy.wrap=[net1,net2]"


@pytest.fixture
def gpt(tmp_path: Path) -> list[str]:
    """A transformer with a tied embedding, two layers and a few steps of six samples."""
    (tmp_path / "words.txt").write_text("to be or not to be, that is the question; " * 60)
    return [
        *("data=text", f"data.path={tmp_path / 'words.txt'}", "data.context=16", "data.val_fraction=0.2"),
        *("data.global_batch_size=6", "model=gpt", "model.layers=2", "model.width=12", "model.heads=2"),
        *("model.dropout=0.1", "optimizer=adamw", "trainer.max_steps=4", "trainer.val_check_interval=4"),
        *("trainer.log_every_n_steps=1", "trainer.gradient_clip_val=0.5", "trainer.num_sanity_val_steps=0"),
        *("trainer.progress=false", "logger=none", "launcher.device=cpu"),
    ]


# --- blocks by size --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (600, [f"blocks.{at}{inside}" for at in (0, 1) for inside in (".attention", ".mlp.0", "")]),
        (1200, ["blocks.0.mlp", "blocks.1.mlp", "blocks"]),
        (1500, ["blocks.0", "blocks.1"]),
    ],
)
def test_blocks_by_size_are_the_innermost_large_enough(least: int, expected: list[str]) -> None:
    model = GPT(context=16, layers=2, width=12, heads=2)  # its embedding is in two places
    assert blocks_of(model, least) == expected


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # torch 2.14: of what Linear returns
@pytest.mark.slow
def test_blocks_do_not_change_bits(gpt: list[str], tmp_path: Path) -> None:
    exact = run_recipe([*gpt, "strategy=ddp_exact", "strategy.shards=6"], 1, tmp_path / "exact")
    for size, least in ((1, 1200), (2, 600), (3, 1200)):
        dealt = run_recipe([*gpt, *FSDP, f"strategy.wrap={least}"], size, tmp_path / f"{size}")
        assert dealt["weights_sha256"] == exact["weights_sha256"], f"{size} ranks, blocks of {least}"
        assert dealt["metrics"]["val/loss"] == exact["metrics"]["val/loss"]


# --- what blocks are gathered in --------------------------------------------------------------------------------------

HALF = "strategy.param_dtype=bfloat16"


@pytest.mark.parametrize("precision", slow_but([], ["32-true", "bf16-mixed"], daily=["bf16-mixed"]))
def test_param_dtype_gives_the_same_bits_on_any_number_of_ranks(precision: str, gpt: list[str], tmp_path: Path) -> None:
    own = [*gpt, *FSDP, HALF, f"trainer.precision={precision}", "callbacks=ema", "trainer.accumulate_grad_batches=2"]
    found = [run_recipe(own, size, tmp_path / f"{size}") for size in (1, 3)]
    assert len({each["weights_sha256"] for each in found}) == 1
    assert len({each["metrics"]["val/loss"] for each in found}) == 1
    state = load(tmp_path / "3" / "checkpoints" / "last.json")
    moments = [value for of_one in state["optimizer"]["state"].values() for value in of_one.values()]
    assert {each.dtype for each in [*state["model"].values(), *moments]} == {torch.float32}
    plain = run_recipe([*gpt, *FSDP, *own[-3:]], 1, tmp_path / "plain")
    assert found[0]["metrics"]["val/loss"] == pytest.approx(plain["metrics"]["val/loss"], rel=0.01)
    assert found[0]["weights_sha256"] != plain["weights_sha256"]


@pytest.mark.slow
def test_param_dtype_leaves_batch_norm_in_32_bits(run: Run) -> None:
    own = [*QUIET, *FSDP, "data.num_samples=53", "data.batch_size=3", "model._target_=own_parts.Norm"]
    whole = run(*own, "strategy.level=2")
    half = [run(*own, HALF, world_size=size) for size in (1, 3)]
    assert len({each["weights_sha256"] for each in half}) == 1
    assert half[0]["metrics"]["val/loss"] == pytest.approx(whole["metrics"]["val/loss"], rel=0.02)
    assert half[0]["weights_sha256"] != whole["weights_sha256"]


def test_layers_of_16_bits_are_refused_where_bits_would_depend_on_the_ranks(run: Run) -> None:
    own = [*QUIET, "data.num_samples=24", "model._target_=exact_parts.HalfOfIt"]
    with pytest.raises(RequestError, match=r"In numbers of torch\.bfloat16 the CPU computes the update of SGD"):
        run(*own, *FSDP, TOY)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # torch's, of skipped steps
@pytest.mark.slow
@pytest.mark.parametrize("own", [[], ["strategy.param_dtype=float16"]])
def test_a_loss_is_scaled_alike_on_all_ranks(own: list[str], run: Run) -> None:
    """Gradients overflow on the rank that has the first rows, until the scale is small enough for them."""
    common = [*QUIET, "checkpoint=default", "trainer.precision=16-mixed", "model._target_=exact_parts.Steep"]
    common += ["data.num_samples=48", "trainer.max_epochs=3", "optimizer=adamw", "trainer.gradient_clip_val=0.1"]
    found = [run(*common, *FSDP, TOY, *own, world_size=size) for size in (1, 3)]
    if not own:
        found.append(run(*common, "strategy=ddp_exact", "strategy.shards=6"))
    assert len({each["weights_sha256"] for each in found}) == 1
    scales = [load(Path(each["last_checkpoint"]))["precision"]["scale"] for each in found]
    assert len({*scales}) == 1
    assert scales[0] < 2**16


# --- on the CPU beside a GPU -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_offload_changes_nothing_on_the_cpu(run: Run) -> None:
    own = [*QUIET, *FSDP, TOY, "data.num_samples=24", "trainer.max_epochs=1"]
    assert len({run(*own, f"strategy.offload={on}", world_size=2)["weights_sha256"] for on in ("true", "false")}) == 1


# --- a learning rate to begin with -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_losses_by_learning_rate_are_those_of_ddp_exact(run: Run) -> None:
    common = [*QUIET, "data.num_samples=240", "tune=lr", "tune_steps=20", "logger=csv", "optimizer=adamw"]
    runs = [run(*common, "strategy=ddp_exact", "strategy.shards=6")]
    runs += [run(*common, *FSDP, TOY, world_size=size) for size in (1, 3)]
    curves = [(Path(each["run_directory"]) / "csv" / "metrics.csv").read_text() for each in runs]
    assert curves[0].count("\n") > 15
    assert curves[0] == curves[1] == curves[2]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.wrap=1000"], r"strategy.wrap=1000: no module of Toy has so many numbers.* its net1 has"),
        (["strategy.param_dtype=bfloat", TOY], r"=bfloat is not allowed. Allowed: bfloat16.* Did you mean 'bfloat16'"),
        (["strategy.param_dtype=float16", TOY], r"gradients in float16 need the loss scaled, as 16-mixed alone does"),
        ([HALF, "check=equivalence", TOY], r"whose parameters are not rounded to strategy.param_dtype=bfloat16"),
        (["model._target_=exact_parts.Spinning", TOY], r"phases is of complex64, and strategy=fsdp reduces gradients"),
        (["model._target_=exact_parts.Eight", TOY], r"bits is of float8_e4m3fn, and .* of float32, bfloat16, float16"),
        (
            ["model._target_=exact_parts.Double", TOY],
            r"net1.weight is of float32 and net1.bias of float64, both in one",
        ),
        (["model._target_=exact_parts.Apart", TOY], r"this one is on 2: net1.bias on cpu, net2.bias on meta"),
        (["model._target_=exact_parts.Ready"], r"^0 is wrapped as DataParallel already, and strategy=fsdp deals the"),
        (["model._target_=exact_parts.Listed", "strategy.wrap=[nets]"], r"nets is a ModuleList, .*wrap=\['nets\.\*'\]"),
        (["strategy.wrap=[net3]"], r"strategy.wrap: net3 matches no module.* Did you mean 'net2'"),
        (["model._target_=exact_parts.Held"], r"Held has none with parameters. .* strategy.wrap=\[net,'heads\.\*'\]"),
        (["model=linear"], r"Linear has none with parameters. It has no modules with parameters in it at all"),
        (["strategy.shards=3", TOY], r"strategy.shards=3 cannot be dealt evenly to 2 processes. Use 1, 3 processes"),
        (["strategy.wrap=0"], r"strategy.wrap=0 is not allowed. Allowed: a whole number at least 1, or text"),
    ],
)
def test_what_cannot_be_is_refused_by_name(overrides: list[str], message: str, run: Run) -> None:
    with pytest.raises(RequestError, match=message):
        run(*QUIET, "strategy=fsdp", *overrides, world_size=2)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["model._target_=exact_parts.Around", TOY], r"A module used parameters of another one without calling it"),
        (
            ["model._target_=exact_parts.Shifted", "strategy.wrap=[net1]", HALF],
            r"meet a tensor of another one, such as",
        ),
    ],
)
def test_a_step_that_fails_says_what_fsdp_has_to_do_with_it(own: list[str], message: str, run: Run) -> None:
    with pytest.raises(Exception, match=message):
        run(*QUIET, "strategy=fsdp", *own, world_size=2)
