"""One dtype throughout, and how tensors lie in memory: what trains, is saved, goes on and is refused."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each, slow_but

Run = Callable[..., Summary]

DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
STRATEGIES = {
    "single": (["strategy=single"], 1),
    "ddp": (["strategy=ddp"], 2),
    "ddp over gloo": (["strategy=ddp", "strategy.shared_memory=false"], 2),
    "dp": (["strategy=dp"], 1),
    "ddp_pipeline": (["strategy=ddp_pipeline"], 2),
    "parameter_server": (["strategy=parameter_server"], 3),
    "fsdp": (["strategy=fsdp", "strategy.wrap=[net1,net2]"], 2),
}


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield those in a state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for each in state.values():
            yield from tensors(each)


@pytest.mark.parametrize("precision", quick_each(2, DTYPES))
@pytest.mark.parametrize("name", slow_but(["ddp"], STRATEGIES))
def test_one_dtype_throughout_learns_nearly_the_same(name: str, precision: str, run: Run, tmp_path: Path) -> None:
    strategy, ranks = STRATEGIES[name]
    overrides = [*strategy, "model._target_=own_parts.Making", "optimizer=adamw", "trainer.gradient_clip_val=0.5"]
    overrides += ["data.num_samples=61", "trainer.log_every_n_steps=1", "trainer.accumulate_grad_batches=2"]
    full = run(*overrides, world_size=ranks)
    found = run(*overrides, f"trainer.precision={precision}", world_size=ranks)
    assert all(math.isfinite(value) for value in found["metrics"].values())
    assert found["weights_sha256"] != full["weights_sha256"]
    near = 0.1 if precision == "bf16-true" else 1e-5
    for metric in ("train/loss", "train/grad_norm", "val/loss"):
        assert found["metrics"][metric] == pytest.approx(full["metrics"][metric], rel=near)
    exported = run(*overrides, "mode=export", f"ckpt_path={found['last_checkpoint']}", world_size=ranks)
    weights = load_file(Path(exported["run_directory"]) / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {DTYPES[precision]}


@pytest.mark.parametrize("precision", DTYPES)
def test_a_checkpoint_is_of_the_dtype_and_so_are_predictions(precision: str, run: Run) -> None:
    overrides = ["strategy=single", "model._target_=own_parts.Norm", "optimizer=adamw"]
    trained = run(*overrides, f"trainer.precision={precision}")
    state = load(Path(trained["last_checkpoint"]))
    several = {each.dtype for each in tensors(state["model"]) if each.is_floating_point()}
    moments = {each.dtype for each in tensors(state["optimizer"]["state"]) if each.dim()}
    assert several == moments == {DTYPES[precision]}
    again = ["mode=predict", f"trainer.precision={precision}", f"ckpt_path={trained['last_checkpoint']}"]
    predicted = run(*overrides, *again)
    predictions = torch.load(Path(predicted["run_directory"]) / "predictions.pt")
    assert predictions.dtype == (torch.float32 if precision == "bf16-true" else torch.float64)


@pytest.mark.slow
def test_64_bits_are_not_rounded_on_the_way(run: Run, weights: Callable[[Summary], dict[str, Tensor]]) -> None:
    """Ranks end with what one process ends with, up to the rounding of 64 bits: so in no sum are there fewer."""
    overrides = ["data.global_batch_size=16", "trainer.precision=64-true", "trainer.gradient_clip_val=0.05"]
    expected = weights(run(*overrides, "strategy=single"))
    for strategy in ("strategy=ddp", "strategy=ddp_pipeline"):
        torch.testing.assert_close(weights(run(*overrides, strategy, world_size=2)), expected, rtol=0, atol=1e-14)


def test_a_resume_in_another_precision_says_so(run: Run, tmp_path: Path) -> None:
    run("trainer.max_epochs=1", directory=tmp_path)
    run("ckpt_path=auto", "trainer.precision=bf16-true", directory=tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert "in torch.float32, and in this run it is of torch.bfloat16: weights are converted" in log


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.precision=16-true"], r"trainer\.precision=16-true is not allowed\. Allowed: 32-true, .*bf16-true"),
        (["trainer.precision=bf16-true", "model._target_=own_parts.Rotating"], r"turns is of torch\.complex64"),
        (["trainer.precision=bf16-true", "callbacks=ema"], r"callbacks\.ema .* of torch\.bfloat16, which rounds that"),
        (
            ["strategy=fsdp", "strategy.wrap=[net1]", "strategy.param_dtype=bfloat16", "trainer.precision=bf16-true"],
            r"both say what the model computes in",
        ),
        (
            ["strategy=fsdp", "strategy.wrap=[net1]", "strategy.shards=2", "trainer.precision=bf16-true"],
            r"the update of SGD .* Use optimizer=adamw",
        ),
        (["strategy=fsdp", "trainer.channels_last=true"], r"channels_last=true does not go with strategy=fsdp"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str, run: Run) -> None:
    with pytest.raises(RequestError, match=message):
        run(*overrides)


# --- how tensors lie in memory ---------------------------------------------------------------------------------------

IMAGES = [
    *("data=fake_images", "data.num_samples=21", "data.val_samples=5", "data.image_size=8", "data.global_batch_size=6"),
    *("~model.hidden_features", "~model.in_features", "~model.out_features", "model._target_=own_parts.Images"),
    *(
        "+model.in_channels=3",
        "+model.num_classes=10",
        "optimizer=adam",
        "optimizer.fused=true",
        "trainer.max_epochs=2",
    ),
]
LAST = ["trainer.channels_last=true", "+model.lie=true"]
PLACES: dict[str, tuple[list[str], int]] = {
    "single": (["strategy=single"], 1),
    "ddp": (["strategy=ddp"], 2),
    "ddp_exact": (["strategy=ddp_exact", "strategy.shards=2"], 2),
    "ddp_pipeline": (["strategy=ddp_pipeline"], 2),
    "parameter_server": (["strategy=parameter_server"], 3),
}


@pytest.mark.parametrize("name", slow_but([], PLACES))
def test_channels_last_learns_nearly_the_same_and_resumes_exactly(
    name: str, run: Run, weights: Callable[[Summary], dict[str, Tensor]], tmp_path: Path
) -> None:
    strategy, ranks = PLACES[name]
    overrides = [*IMAGES, *strategy]
    lies = LAST if name != "ddp_pipeline" else LAST[:1]  # what a stage is sent lies as it came
    plain = run(*overrides, world_size=ranks)
    whole = run(*overrides, *lies, world_size=ranks)
    torch.testing.assert_close(weights(whole), weights(plain), rtol=0, atol=2e-3)
    for limit in ("trainer.max_steps=3", "trainer.max_epochs=2"):
        moved = run(*overrides, *lies, limit, "ckpt_path=auto", world_size=ranks, directory=tmp_path / "moved")
    assert moved["weights_sha256"] == whole["weights_sha256"]
