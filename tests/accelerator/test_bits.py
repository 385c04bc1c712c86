"""Runs on a simulated accelerator, over groups with NCCL's habits, end with the bits of the CPU."""

from collections.abc import Callable

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.accelerator import HABITS, Accelerator
from helpers.marks import slow_but

Run = Callable[..., Summary]

WITHOUT = "~task.metrics"  # the simulated device has no absolute values but those of float32
STRATEGIES = {
    "single": (["strategy=single"], 1),
    "ddp": (["strategy=ddp"], 2),
    "ddp on four": (["strategy=ddp", "strategy.shared_memory=false", "trainer.gradient_clip_val=0.1"], 4),
    "ddp_exact": (["strategy=ddp_exact"], 2),
    "ddp_exact on three": (["strategy=ddp_exact", "optimizer=adamw"], 3),
    "fsdp": (["strategy=fsdp", "strategy.wrap=[net1,net2]"], 2),
    "fsdp level 1": (["strategy=fsdp", "strategy.wrap=[net1,net2]", "strategy.level=1"], 2),
    "fsdp with shards": (["strategy=fsdp", "strategy.wrap=[net1,net2]", "strategy.shards=4"], 2),
    "fsdp of tensors that are made later": (["strategy=fsdp", "model=mlp", "model.hidden_features=[128,64]"], 2),
    "ddp_pipeline": (["strategy=ddp_pipeline"], 2),
    "split over two devices, clipped": (["strategy=single", "model=toy_mp", "trainer.gradient_clip_val=0.1"], 1),
    "two pipelines": (["strategy=ddp_pipeline"], 4),
    "ddp in bfloat16": (["strategy=ddp", "trainer.precision=bf16-true", "optimizer=adamw", WITHOUT], 2),
    "ddp_exact in bfloat16": (["strategy=ddp_exact", "trainer.precision=bf16-true", "optimizer=adamw", WITHOUT], 2),
    "fsdp in 64 bits": (["strategy=fsdp", "strategy.wrap=[net1,net2]", "trainer.precision=64-true", WITHOUT], 2),
}


@pytest.mark.parametrize("name", slow_but(["fsdp"], STRATEGIES))
def test_a_run_ends_with_the_bits_of_the_cpu(name: str, accelerator: Accelerator, run: Run) -> None:
    overrides, ranks = STRATEGIES[name]
    ended = accelerator.run(*overrides, ranks=ranks, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    assert ended.summary["weights_sha256"] == run(*overrides, world_size=ranks)["weights_sha256"]
    assert (ended.summary["status"], ended.summary["device"]) == ("finished", "OpenReg")
    assert ended.summary["peak_memory_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "ddp", "ddp_exact", "fsdp"])
def test_a_strategy_is_checked_against_one_process_on_the_device(name: str, accelerator: Accelerator) -> None:
    overrides, ranks = STRATEGIES[name]
    ended = accelerator.run(*overrides, "check=equivalence", ranks=ranks, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    assert ended.summary["metrics"]["check/parameter"] < 1e-5


TIED = """
from torch import nn


class Tied(nn.Sequential):
    def __init__(self, in_features, hidden_features, out_features):
        tied = nn.Linear(in_features, in_features), nn.Linear(in_features, in_features)
        super().__init__(tied[0], nn.Tanh(), tied[1], nn.Linear(in_features, out_features))
        tied[1].weight = tied[0].weight
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    ["strategy=single", "strategy=single model.num_devices=2 model.split=['3']", "strategy=fsdp strategy.wrap=[3]"],
)
def test_weights_that_are_one_stay_one_on_the_device(own: str, accelerator: Accelerator) -> None:
    (accelerator.folder / "tied.py").write_text(TIED)
    overrides = [*own.split(), "model._target_=tied.Tied"]
    ended, cpu = (
        accelerator.run(*overrides, *more, ranks=2 if "fsdp" in own else 1, name=name)
        for name, more in (("device", []), ("cpu", ["launcher.device=cpu"]))
    )
    assert (ended.status, cpu.status) == (0, 0), f"{ended.err}\n{cpu.err}"
    assert ended.summary["weights_sha256"] == cpu.summary["weights_sha256"]


NOISY = """
import torch
from torch import nn


class Noisy(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.layer = nn.Linear(features, features)

    def forward(self, inputs=None):
        drawn = torch.openreg.default_generators[0]  # kernels of the simulated device draw from the CPU's
        drawn.manual_seed(drawn.initial_seed() + 1)
        return inputs + self.layer(inputs).relu() * torch.full_like(inputs, drawn.initial_seed() % 5)


class Model(nn.Module):
    def __init__(self, in_features, hidden_features, out_features):
        super().__init__()
        self.blocks = nn.ModuleList(Noisy(in_features) for _ in range(2))
        self.head = nn.Linear(in_features, out_features)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs=inputs)
        return self.head(inputs)
"""


def test_what_is_computed_again_draws_the_same_numbers_of_the_device(accelerator: Accelerator) -> None:
    (accelerator.folder / "noisy.py").write_text(NOISY)
    weights = []
    for again in ("false", "true"):
        own = ["strategy=single", "model._target_=noisy.Model", f"model.activation_checkpointing={again}"]
        ended = accelerator.run(*own, "optimizer.lr=0.001", "trainer.max_epochs=1", name=again)
        assert ended.status == 0, ended.err
        weights.append(ended.summary["weights_sha256"])
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_replicas_of_two_devices_need_a_backend_that_takes_both(accelerator: Accelerator, run: Run) -> None:
    own = ["strategy=ddp", "model=toy_mp"]
    habits = {**HABITS["all"], "STAGED_ONE_DEVICE": "0"}
    ended = accelerator.run(*own, ranks=2, habits=habits)
    assert ended.status == 0, ended.err
    assert ended.summary["weights_sha256"] == run(*own, world_size=2)["weights_sha256"]
    refused = accelerator.run(*own, ranks=2, habits=HABITS["all"], name="refused")
    assert refused.status == 1
    assert "The backend has one device a process group, and a replica spans several" in refused.err


@pytest.mark.slow
def test_that_bits_take_deterministic_kernels_is_said_once(accelerator: Accelerator) -> None:
    own = ["strategy=ddp_exact", "trainer.max_epochs=1"]
    ended = accelerator.run(*own, ranks=2)
    assert (ended.out + ended.err).count("Set trainer.deterministic=true") == 1
    asked = accelerator.run(*own, "trainer.deterministic=true", ranks=2, name="asked")
    assert (asked.status, "Set trainer.deterministic=true" in asked.out + asked.err) == (0, False)
