"""A model that no rank holds whole: with ``strategy=fsdp`` it is made, filled, trained and evaluated in parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.testing import run_recipe

Run = Callable[..., Summary]


class Kinds(nn.Module):
    """Has large and small parameters, of a size that ranks cannot share evenly, tied and frozen ones, and buffers."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(*sizes) for sizes in ((601, 97), (97, 601), (601, 97)))
        nn.init.orthogonal_(self.blocks[1].weight)
        self.blocks[2].weight = nn.Parameter(self.blocks[0].weight.detach() * 0.5)
        self.first = nn.Linear(in_features, 601)
        self.same = self.first.weight
        self.last = nn.Linear(97, out_features)
        self.norm = nn.LayerNorm(601)
        self.register_buffer("scale", torch.rand(97, 97), persistent=False)
        self.register_buffer("table", torch.full((4100,), 0.5))
        self.constant = torch.linspace(0, 1, 97 * 97).view(97, 97)

    def forward(self, input: Tensor) -> Tensor:
        inner = F.relu(self.norm(self.first(input))) + input @ self.same.t()
        for block in self.blocks:
            inner = F.relu(block(inner))
        outputs: Tensor = self.last(inner @ (self.scale + self.constant) * self.table[0])
        return outputs


SMALL = [
    *("data=random", "data.num_samples=48", "data.global_batch_size=12", "data.val_samples=13", "data.in_features=10"),
    *("data.out_features=5", "model=toy", "model._target_=test_larger_than_a_rank.Kinds", "optimizer=adamw"),
    *("model.freeze=[last.bias,blocks.0.weight]", "seed=3", "trainer.max_epochs=2", "trainer.progress=false"),
    *("trainer.gradient_clip_val=0.5", "launcher.device=cpu", "logger=none"),
]
EXACT = ["strategy=ddp_exact", "strategy.shards=6"]
FSDP = ["strategy=fsdp", "strategy.shards=6"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(Path(__file__).parent)
        return run_recipe([*SMALL, *EXACT], 1, tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize(
    ("own", "size"),
    [
        ([], 2),
        (["strategy.replicas=3", "strategy.level=2", "model.activation_checkpointing=true"], 6),
        pytest.param(["strategy.level=1"], 3, marks=pytest.mark.slow),
        pytest.param([], 1, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_tensor_gets_the_values_of_a_whole_model(
    own: list[str], size: int, exact: Summary, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    dealt = run(*SMALL, *FSDP, *own, "checkpoint=none", world_size=size)
    assert dealt["weights_sha256"] == exact["weights_sha256"]
    assert dealt["metrics"]["val/loss"] == exact["metrics"]["val/loss"]
    assert "makes the whole model" not in capfd.readouterr().err


def test_weights_come_from_a_checkpoint_or_a_file(exact: Summary, run: Run, tmp_path: Path) -> None:
    trained = exact["last_checkpoint"]
    validated = run(*SMALL, *FSDP, "mode=validate", f"ckpt_path={trained}", world_size=2)
    assert validated["metrics"]["val/loss"] == exact["metrics"]["val/loss"]
    assert validated["weights_sha256"] == exact["weights_sha256"]
    for number, own in enumerate((FSDP, EXACT)):
        run(
            *SMALL, *own, "mode=export", f"ckpt_path={trained}", directory=tmp_path / f"{number}", world_size=2 - number
        )
    files: list[dict[str, Any]] = [load_file(tmp_path / f"{number}" / "model.safetensors") for number in (0, 1)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())
    tuned = [
        run(*SMALL, *own, f"weights_from={tmp_path}/0/model.safetensors", "checkpoint=none", world_size=size)
        for own, size in ((EXACT, 1), (FSDP, 3))
    ]
    assert tuned[0]["weights_sha256"] == tuned[1]["weights_sha256"] != exact["weights_sha256"]


def test_a_run_goes_on_and_is_what_one_process_computes(exact: Summary, run: Run, tmp_path: Path) -> None:
    for own, size, steps in ((FSDP, 2, 3), (EXACT, 1, 5), (FSDP, 3, 8)):
        limits = [f"trainer.max_steps={steps}", "ckpt_path=auto", "callbacks=ema"]
        moved = run(*SMALL, *own, *limits, world_size=size, directory=tmp_path / "moved")
    whole = run(*SMALL, *EXACT, "callbacks=ema", "checkpoint=none")
    assert moved["weights_sha256"] == whole["weights_sha256"]
    checked = run(*SMALL, "strategy=fsdp", "check=equivalence", "seed=4", "checkpoint=none", world_size=2)
    assert checked["metrics"]["check/parameter"] < 1e-5
