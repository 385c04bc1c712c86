"""A model that no rank holds whole: with ``strategy=fsdp`` it is made, filled, trained and evaluated in parts."""

import ctypes
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store
from torch.nn import functional as F

from ddp_recipes import rank
from ddp_recipes.models.gpt import GPT
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks
from helpers.patience import patience
from helpers.ranks import run_recipe

Run = Callable[..., Summary]


class Kinds(nn.Module):
    """Has large and small parameters, a number, sizes that ranks cannot share evenly, tied and frozen ones, buffers."""

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
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.gain.register_hook(lambda gradient: 0.5 * gradient)
        self.constant = torch.linspace(0, 1, 97 * 97).view(97, 97)

    def forward(self, input: Tensor) -> Tensor:
        inner = F.relu(self.norm(self.first(input))) + input @ self.same.t()
        for block in self.blocks:
            inner = F.relu(block(inner))
        outputs: Tensor = self.last(inner @ (self.scale + self.constant) * self.table[0]) * self.gain
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "size"),
    [
        ([], 2),
        pytest.param(
            ["strategy.replicas=3", "strategy.level=2", "model.activation_checkpointing=true"],
            6,
            marks=pytest.mark.slow,
        ),
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_goes_on_and_is_what_one_process_computes(exact: Summary, run: Run, tmp_path: Path) -> None:
    for own, size, steps in ((FSDP, 2, 3), (EXACT, 1, 5), (FSDP, 3, 8)):
        limits = [f"trainer.max_steps={steps}", "ckpt_path=auto", "callbacks=ema"]
        moved = run(*SMALL, *own, *limits, world_size=size, directory=tmp_path / "moved")
    whole = run(*SMALL, *EXACT, "callbacks=ema", "checkpoint=none")
    assert moved["weights_sha256"] == whole["weights_sha256"]
    checked = run(*SMALL, "strategy=fsdp", "check=equivalence", "seed=4", "checkpoint=none", world_size=2)
    assert checked["metrics"]["check/parameter"] < 1e-5


# --- under a limit ---------------------------------------------------------------------------------------------------

LARGE = {"layers": 40, "width": 448, "heads": 2, "context": 8}


def status(key: str) -> int:
    """Return bytes of this process, as Linux counts them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def under_limit(folder: Path, own: list[str], size: int, limit: int | None) -> list[dict[str, Any]]:
    """Train on ranks that may use so many bytes more than they do after a run of a tiny model."""
    (folder / "words.txt").write_text("to be or not to be, that is the question; " * 60)
    common = [
        *("data=text", f"data.path={folder / 'words.txt'}", "data.context=8", "data.global_batch_size=6", "model=gpt"),
        *("optimizer=adamw", "trainer.max_steps=2", "trainer.limit_val_batches=1", "trainer.progress=false"),
        *("launcher.device=cpu", "logger=none", "checkpoint=none", f"launcher.nproc_per_node={size}", *own),
    ]
    tiny = make_job([*common, "model.layers=1", "model.width=16", "model.heads=2"], folder / f"{own[0]}_tiny")
    sizes = [f"model.{key}={value}" for key, value in LARGE.items() if key != "context"]
    large = make_job([*common, *sizes], folder / f"{own[0]}_large")

    def train(world: World, store: Store | None) -> dict[str, Any]:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "262144"  # as if the process had been started so
        # With one arena, another takes 64 MiB of addresses; and with room for what is small, torch's own errors, too.
        for name, value in ((-3, 262144), (-1, 262144), (-8, 1), (-2, 16 * 1024 * 1024)):
            ctypes.CDLL(None).mallopt(name, value)
        messages = [None if store is None else Messages(PrefixStore(str(at), store), private=True) for at in (0, 1)]
        rank.run(tiny, world, messages[0])
        before, resident = status("VmSize"), status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (before + limit, before + limit))
        try:
            summary = rank.run(large, world, messages[1])
        except Exception as error:
            return {"failed": str(error)}
        peak = status("VmHWM") - resident
        return {"sha256": summary["weights_sha256"], "loss": summary["metrics"]["train/loss"], "peak": peak}

    return on_ranks(train, size, timeout_s=patience(400))


@pytest.mark.nightly
def test_a_model_of_four_times_the_memory_of_a_rank_trains_on_six(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = GPT(**LARGE)  # type: ignore[arg-type]
    state = 16 * sum(parameter.numel() for parameter in model.parameters())  # with gradients, and two numbers of AdamW
    block = 4 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    dealt = under_limit(tmp_path, FSDP, 6, state // 4)
    assert not any("failed" in each for each in dealt), dealt
    (whole,) = under_limit(tmp_path, EXACT, 1, None)
    assert [dealt[0][key] for key in ("sha256", "loss")] == [whole[key] for key in ("sha256", "loss")]
    assert whole["peak"] > state
    assert max(each["peak"] for each in dealt) < state / 6 + 10 * block, dealt
    for failed in under_limit(tmp_path, ["strategy=ddp"], 2, state // 4):
        assert re.search("memory|can't start new thread", failed["failed"])
