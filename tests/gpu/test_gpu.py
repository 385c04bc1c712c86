"""What needs a GPU; skipped elsewhere."""

import json
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from ddp_recipes import rank
from ddp_recipes._compat.messages import lost_a_rank
from ddp_recipes.callbacks import Callback
from ddp_recipes.data.loader import Loader
from ddp_recipes.data.order import BatchPlan, Sequential
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import DDP, DDPSettings
from ddp_recipes.strategies.exchanges import Exchanges, leave_failures_to_us
from ddp_recipes.testing import make_job
from helpers.patience import patience

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
    subprocess.run([*command, *clip], check=True, timeout=patience(300), cwd=tmp_path, env=environ)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.spawn
def test_nccl_ddp_over_all_gpus_by_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddp_recipes", *TINY, "model=toy", f"hydra.run.dir={tmp_path / 'run'}"]
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    subprocess.run(command, check=True, timeout=patience(300), cwd=tmp_path, env=environ)
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


def test_a_group_of_nccl_is_aborted_from_another_thread_and_joined_anew() -> None:
    """With one rank: two on one GPU are not supported by NCCL."""
    device = torch.device("cuda", 0)
    strategy = DDP(DDPSettings())
    leave_failures_to_us()
    for _ in range(2):
        strategy.setup(World(), None, "nccl", timedelta(seconds=60), None)
        assert strategy.silent
        other = dist.new_group([0])
        strategy.exchanges = exchanges = Exchanges([device], 60, strategy.abort)
        values = torch.ones(1, 1, device=device)
        for group in (None, other):
            dist.all_reduce(values, group=group)
        assert strategy.sum(values).item() == 1
        thread = Thread(target=exchanges.end)
        thread.start()
        thread.join()
        with pytest.raises(dist.DistBackendError, match="A rank was lost"):
            exchanges.synchronize()
        for group in (None, other):
            with pytest.raises(RuntimeError) as raised:
                dist.all_reduce(values, group=group)
            assert lost_a_rank(raised.value)
        exchanges.end()
        strategy.teardown()
        assert not dist.is_initialized()


def test_what_the_device_does_not_finish_in_time_is_not_used() -> None:
    exchanges = Exchanges([torch.device("cuda", 0)], 0.1, lambda: None)
    torch.cuda._sleep(4 * 10**9)  # cycles, which are seconds
    with pytest.raises(dist.DistBackendError, match=r"Timed out waiting 0\.1 s") as raised:
        exchanges.synchronize()
    assert lost_a_rank(raised.value)
    torch.cuda.synchronize()
    exchanges.synchronize()


def test_a_device_on_which_too_much_waits_is_found_late_as_well() -> None:
    """The process waits in the launch of a kernel then, and with it each thread that would ask the device."""
    exchanges = Exchanges([torch.device("cuda", 0)], 1.0, lambda: None, settles=False)
    values = torch.zeros(1, device="cuda")
    torch.cuda._sleep(8 * 10**9)  # cycles, which are seconds
    for _ in range(5000):
        values.add_(1)
    assert exchanges.late
    torch.cuda.synchronize()


class Greedy(Callback):
    """Asks for more memory than there is."""

    def on_step(self, step: int) -> None:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def test_a_rank_without_memory_leaves_a_snapshot(tmp_path: Path) -> None:
    sys.modules.setdefault(__name__, sys.modules[Greedy.__module__])
    greedy = f"+callbacks.greedy._target_={__name__}.Greedy"
    with pytest.raises(torch.OutOfMemoryError) as raised:
        rank.run(job(tmp_path, "model=toy", "callbacks=memory_history", greedy), World(), None)
    torch.cuda.memory._record_memory_history(enabled=None)
    left = tmp_path / "ranks" / "memory_0.pickle"
    assert any(str(left) in note for note in raised.value.__notes__)
    assert left.stat().st_size > 0


def test_data_may_be_on_the_gpu_already() -> None:
    loader = Loader(
        TensorDataset(torch.arange(8.0, device="cuda"), torch.arange(8, device="cuda")),
        BatchPlan(Sequential(8), global_batch_size=4),
        torch.device("cuda", 0),
    )
    assert [each.data[0].tolist() for each in loader.batches(0)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


KILLS = """
import os
from pathlib import Path
from signal import SIGKILL, SIGSTOP

from ddp_recipes import Callback


class Disturbing(Callback):
    def __init__(self, rank, at, signal):
        self.at, self.signal, self.mine = at, signal, rank == int(os.environ["RANK"])

    def on_step(self, step):
        if self.mine and step in self.at and not Path(f"done_{step}").exists():
            Path(f"done_{step}").touch()
            os.kill(os.getpid(), SIGSTOP if self.signal == "stop" else SIGKILL)
"""
REPLACED = [
    "data.global_batch_size=16",
    "launcher.replace_ranks=2",
    "launcher.timeout_s=10",
    "hydra.run.dir=run",
]


@pytest.mark.parametrize(
    "strategy",
    [
        ["strategy=ddp_exact", "launcher.nproc_per_node=2"],
        ["strategy=ddp", "launcher.nproc_per_node=2"],
        ["strategy=fsdp", "strategy.replicas=2", "launcher.nproc_per_node=4"],
        ["strategy=ddp_pipeline", "strategy.stages=2", "launcher.nproc_per_node=4"],
    ],
    ids=["ddp_exact", "ddp", "fsdp", "ddp_pipeline"],
)
@pytest.mark.parametrize(
    ("rank", "signal"), [(0, "kill"), (1, "kill"), (1, "stop")], ids=["rank 0", "rank 1", "rank 1 hangs"]
)
def test_a_lost_rank_is_replaced_over_nccl(strategy: list[str], rank: int, signal: str, tmp_path: Path) -> None:
    ranks = int(strategy[-1][-1])
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs: NCCL takes one rank on each")
    command = [sys.executable, "-m", "ddp_recipes", *TINY, *REPLACED, "model=mlp", *strategy]
    values = f"{{_target_: kills.Disturbing, rank: {rank}, at: [5, 21], signal: {signal}}}"
    hashes = []
    for name, disturbed in (("whole", []), ("hurt", [f"+callbacks.disturbing={values}"])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "kills.py").write_text(KILLS)
        environ = {**os.environ, "PYTHONPATH": str(folder)}
        ended = subprocess.run(
            [*command, *disturbed], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert summary["ranks_replaced"] == 2 * bool(disturbed), ended.stderr
        hashes.append(summary["weights_sha256"])
    assert hashes[0] == hashes[1]
