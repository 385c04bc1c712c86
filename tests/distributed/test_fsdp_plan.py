"""``plan=true strategy=fsdp``: what it says of memory and of what is sent is what real ranks take."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Store

from benchmarks.dry_run import CASES, MODELS, QUIET, compared
from ddp_recipes import rank
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks
from helpers.marks import slow_but

# Each kind of shards once; all of them, and all models, at night.
QUICK = (23,)
DAILY = (3,)
SOME = slow_but([CASES[number] for number in QUICK], CASES, [CASES[number] for number in DAILY])
TEXT = "to be, or not to be, that is the question: " * 400


@pytest.mark.parametrize(("model", "size", "own"), SOME)
def test_ranks_take_and_send_what_a_dry_run_says(model: str, size: int, own: tuple[str, ...], tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text(TEXT)
    path = (f"data.path={text}",) if "gpt" in model else ()
    planned, real = compared((*QUIET, "strategy=fsdp", *MODELS[model], *path, *own), size)
    assert planned.training == pytest.approx(real.training, rel=0.1)
    assert planned.validation == pytest.approx(real.validation, rel=0.15)
    assert planned.given == pytest.approx(real.given, abs=500)


# --- what would make it fit ------------------------------------------------------------------------------------------

GPT = ["data=text", "data.context=16", "data.batch_size=16", "data.val_batch_size=8", "model=gpt", "model.layers=4"]
GPT += ["model.width=32", "optimizer=adamw", *QUIET]


def plan(folder: Path, *overrides: str) -> dict[str, Any]:
    """Return what is in ``plan.json``."""
    (text := folder / "text.txt").write_text(TEXT)
    folder = folder / f"plan_{len(list(folder.iterdir()))}"
    job = make_job([*GPT, f"data.path={text}", "launcher.nproc_per_node=4", *overrides, "plan=true"], folder)

    def run(world: World, store: Store | None) -> Summary:
        return rank.run(job, world, store)

    on_ranks(run, 1)
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


def peak(planned: dict[str, Any]) -> int:
    return int(planned["memory"][0]["peak"])


def remedies(planned: dict[str, Any]) -> list[str]:
    (message,) = [each["message"] for each in planned["findings"] if each["kind"] == "memory_does_not_fit"]
    assert all(f"{each['overrides']} (" in message for each in planned["would_fit"])
    return [each["overrides"] for each in planned["would_fit"]]


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_told_what_does(tmp_path: Path) -> None:
    """With each of the overrides by itself, to the byte."""
    whole = peak(plan(tmp_path, "strategy=ddp"))
    planned = plan(tmp_path, "strategy=ddp", f"plan.gpu_memory_gb={0.9 * whole / 1e9}")
    assert planned["fits"] is False
    smaller = "data.batch_size=8 trainer.accumulate_grad_batches=2"
    assert remedies(planned) == ["strategy=fsdp", "model.activation_checkpointing=true", smaller]
    for each in planned["would_fit"]:
        other = plan(tmp_path, "strategy=ddp", f"plan.gpu_memory_gb={0.9 * whole / 1e9}", *each["overrides"].split())
        assert (other["fits"], peak(other), other["findings"]) == (True, each["peak"], [])


@pytest.mark.nightly
def test_several_together_are_named_where_none_is_enough(tmp_path: Path) -> None:
    dealt = [*("strategy=fsdp", "model.activation_checkpointing=true", "data.batch_size=1", "data.val_batch_size=1")]
    least = peak(plan(tmp_path, *dealt, "trainer.accumulate_grad_batches=16"))
    planned = plan(tmp_path, "strategy=fsdp", "strategy.level=1", f"plan.gpu_memory_gb={1.1 * least / 1e9}")
    (together,) = remedies(planned)
    assert together.startswith("strategy.level=3 model.activation_checkpointing=true data.batch_size=")
    none = plan(tmp_path, "strategy=fsdp", f"plan.gpu_memory_gb={0.5 * least / 1e9}")
    assert (none["fits"], remedies(none)) == (False, [])


@pytest.mark.slow
def test_only_smaller_batches_of_validation_are_named_where_they_do(tmp_path: Path) -> None:
    uneven = ["strategy=fsdp", "data.batch_size=2", "data.val_batch_size=256"]
    training = plan(tmp_path, *uneven)["memory"][0]["training"]
    planned = plan(tmp_path, *uneven, f"plan.gpu_memory_gb={1.01 * training / 1e9}")
    (smaller,) = remedies(planned)
    assert smaller.startswith("data.val_batch_size=")
