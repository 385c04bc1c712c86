"""What needs a GPU; skipped elsewhere."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from ddp_recipes import rank
from ddp_recipes.callbacks import Callback
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is visible"),
]
TINY = ["data=random", "data.num_samples=256", "data.val_samples=32", "trainer.max_epochs=2", "trainer.progress=false"]


class RefuseSyncs(Callback):
    """Makes torch raise where a step waits for the device, but for the steps that log."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_step(self, step: int) -> None:
        quiet = step >= 2 and (step + 1) % self.every != 0
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")

    def on_validation(self, step: int, metrics: object) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")


class TimeSteps(Callback):
    """Notes how long steps from the second on take, the device's work included."""

    seconds = 0.0

    def on_step(self, step: int) -> None:
        if step == 1:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        self.steps = step - 1

    def on_end(self) -> None:
        torch.cuda.synchronize()
        type(self).seconds = (time.perf_counter() - self.began) / self.steps


def job(directory: Path, *overrides: str) -> Job:
    return make_job([*TINY, "launcher.device=cuda", *overrides], directory)


def test_one_gpu_trains_and_evaluates(tmp_path: Path) -> None:
    summary = rank.run(job(tmp_path, "model=toy"), World(), None)
    assert summary["status"] == "finished"
    assert summary["device"] == torch.cuda.get_device_name(0)


def test_gpu_and_cpu_end_with_the_same_weights_but_for_rounding(tmp_path: Path) -> None:
    on_gpu = rank.run(job(tmp_path / "gpu", "model=toy"), World(), None)
    on_cpu = rank.run(job(tmp_path / "cpu", "model=toy", "launcher.device=cpu"), World(), None)
    weights = [
        torch.load(summary["last_checkpoint"], weights_only=True, map_location="cpu")["model"]
        for summary in (on_gpu, on_cpu)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5)


def test_a_step_that_does_not_log_does_not_wait_for_the_device(tmp_path: Path) -> None:
    every = 10
    watch = f"+callbacks.watch={{_target_: {__name__}.RefuseSyncs, every: {every}}}"
    sys.modules.setdefault(__name__, sys.modules[RefuseSyncs.__module__])
    overrides = ["model=toy", f"trainer.log_every_n_steps={every}", "trainer.check_val_every_n_epoch=2", watch]
    assert rank.run(job(tmp_path, *overrides, "checkpoint=none"), World(), None)["status"] == "finished"


def test_step_time_is_the_time_of_the_device(tmp_path: Path) -> None:
    """Its kernels take longer than it takes to enqueue them."""
    sys.modules.setdefault(__name__, sys.modules[TimeSteps.__module__])
    overrides = [
        "model=mlp",
        "model.hidden_features=[8192,8192,8192,8192]",
        "data.batch_size=8",
        "data.val=null",
        "trainer.log_every_n_steps=1000",
        f"+callbacks.timed._target_={__name__}.TimeSteps",
    ]
    summary = rank.run(job(tmp_path, *overrides, "checkpoint=none", "logger=none"), World(), None)
    assert summary["step_time_ms"] == pytest.approx(1e3 * TimeSteps.seconds, rel=0.3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains(tmp_path: Path, precision: str) -> None:
    summary = rank.run(job(tmp_path, "model=toy", f"trainer.precision={precision}"), World(), None)
    assert summary["metrics"]["val/loss"] < 1.0


def test_the_profiler_counts_what_kernels_take(tmp_path: Path) -> None:
    overrides = ["debug=profiler", "trainer.log_every_n_steps=1", "data.batch_size=16", "logger=none"]
    rank.run(job(tmp_path, "model=toy", *overrides), World(), None)
    rows = re.findall(
        r"^  (\S.*?) +[\d.]+ ms +\d+% +GPU ([\d.]+) ms$", (tmp_path / "train.log").read_text(), re.MULTILINE
    )
    kernels = {name: float(took) for name, took in rows}
    assert all(kernels[name] > 0 for name in ("forward", "backward", "optimizer"))
    step = kernels.pop("step")
    assert sum(kernels.values()) == pytest.approx(step, abs=0.01)


class NotePlaces(Callback):
    """Notes where what an optimizer updates is, and its state, and what the GPU holds beside."""

    places: ClassVar[set[str]] = set()
    held = 0

    def on_step(self, step: int) -> None:
        optimizer = self.run.optimizer
        tensors = [each for group in optimizer.param_groups for each in group["params"]]
        moments = [each for of_one in optimizer.state.values() for each in of_one.values() if each.dim() > 0]
        type(self).places = {each.device.type for each in [*tensors, *moments]}
        type(self).held = torch.cuda.memory_allocated()


@pytest.mark.parametrize("own", [[], ["strategy.shards=4"], ["strategy.param_dtype=bfloat16"]])
def test_fsdp_offload_keeps_rows_on_the_cpu(tmp_path: Path, own: list[str]) -> None:
    sys.modules.setdefault(__name__, sys.modules[NotePlaces.__module__])
    overrides = [
        *("model=mlp", "model.hidden_features=[1024,1024]", "strategy=fsdp", "optimizer=adamw", "callbacks=ema"),
        *("trainer.gradient_clip_val=0.5", f"+callbacks.noted._target_={__name__}.NotePlaces", *own),
    ]
    held, losses = [], []
    for offload, place in (("false", "cuda"), ("true", "cpu")):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        summary = rank.run(job(tmp_path / place, *overrides, f"strategy.offload={offload}"), World(), None)
        assert NotePlaces.places == {place}
        held.append(NotePlaces.held - before)
        losses.append(summary["metrics"]["val/loss"])
    assert held[1] < held[0] / 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.spawn
@pytest.mark.parametrize("own", [[], ["strategy.offload=true"]])
def test_nccl_fsdp_over_all_gpus_by_command(tmp_path: Path, own: list[str]) -> None:
    command = [sys.executable, "-m", "ddp_recipes", *TINY, "model=mlp", "strategy=fsdp", *own]
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    clip = ["trainer.gradient_clip_val=0.5", f"hydra.run.dir={tmp_path / 'run'}"]
    subprocess.run([*command, *clip], check=True, timeout=300, cwd=tmp_path, env=environ)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.spawn
def test_nccl_ddp_over_all_gpus_by_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddp_recipes", *TINY, "model=toy", f"hydra.run.dir={tmp_path / 'run'}"]
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    subprocess.run(command, check=True, timeout=300, cwd=tmp_path, env=environ)
    assert (tmp_path / "run" / "summary.json").exists()


TWO = ["model.num_devices=2", "model.split=[net2]"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("model", [["model=toy_mp"], ["model=toy", *TWO], ["model=toy", *TWO, "model.micro_batches=3"]])
def test_a_replica_over_two_gpus_equals_one_on_one_gpu(tmp_path: Path, model: list[str]) -> None:
    split = rank.run(job(tmp_path / "split", *model), World(), None)
    whole = rank.run(job(tmp_path / "whole", "model=toy"), World(), None)
    assert split["devices_per_replica"] == 2
    assert split["metrics"]["val/loss"] == pytest.approx(whole["metrics"]["val/loss"], rel=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_an_even_split_of_a_resnet_trains_on_two_gpus(tmp_path: Path) -> None:
    images = ["data=fake_images", "data.num_samples=32", "data.val_samples=8", "data.image_size=32", "model=resnet18"]
    split = rank.run(job(tmp_path, *images, "model.num_devices=2", "model.micro_batches=2"), World(), None)
    assert split["status"] == "finished"
    assert len(split["split"]) == 1


IMAGES = ["data=fake_images", "data.num_samples=128", "data.val_samples=64", "data.image_size=224", "model=resnet50"]


@pytest.mark.parametrize(
    "overrides",
    [
        [*IMAGES, "data.batch_size=32"],
        [*IMAGES, "data.batch_size=32", "trainer.precision=bf16-mixed", "optimizer=adamw"],
        [*IMAGES, "data.batch_size=16", "trainer.accumulate_grad_batches=2", "data.val=null"],
        ["model=mlp", "model.hidden_features=[8192,8192,8192]", "optimizer=adamw"],
    ],
    ids=lambda value: " ".join(value),
)
def test_a_plan_tells_the_memory_that_a_run_takes(tmp_path: Path, overrides: list[str]) -> None:
    """Within a tenth of what the allocator gave at most; workspaces, which a plan leaves out, are small here."""
    overrides = [*overrides, "strategy=single", "trainer.max_epochs=1", "logger=none", "checkpoint=none"]
    rank.run(job(tmp_path / "plan", *overrides, "plan=true"), World(), None)
    (memory,) = json.loads((tmp_path / "plan" / "plan.json").read_text())["memory"]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rank.run(job(tmp_path / "run", *overrides), World(), None)
    assert memory["peak"] == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.1)
