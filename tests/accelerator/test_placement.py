"""What lies where on a simulated accelerator, and which device is whose."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.accelerator import HABITS, Accelerator

PLACES = """
from ddp_recipes import Callback


class Places(Callback):
    def on_step(self, step):
        (optimizer,) = self.run.optimizers
        states = [*optimizer.state.values()]
        print("PLACES", step, sorted({f"{name} {each[name].device.type}" for each in states for name in each}))
"""
HELD = """
import torch
from torch.utils.data import Dataset, TensorDataset

from ddp_recipes import Callback


def place(kind, number):
    return f"{kind}:{number}" if kind != "cpu" else kind


def together(kind, number=0, **sizes):
    inputs, targets = torch.arange(640.0).view(64, 10).div(640), torch.arange(320.0).view(64, 5).div(320)
    return TensorDataset(inputs.to(place(kind, number)), targets.to(place(kind, number)))


class OneByOne(Dataset):
    def __init__(self, kind, number=0, **sizes):
        self.whole = together(kind, number)

    def __len__(self):
        return len(self.whole)

    def __getitem__(self, index):
        return self.whole[index]


class More(Callback):
    def on_step(self, step):
        if self.run.world.rank == 1:
            torch.zeros(10 << 20, dtype=torch.uint8, device=self.run.devices[0])
"""
OWN = """
import torch
from torch import nn


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.arange(5.0))

    def forward(self, outputs, targets):
        return ((outputs - targets).square() * self.weights).sum(1)


class Returns(nn.Module):
    def __init__(self, in_features, hidden_features, out_features, devices):
        super().__init__()
        self.devices = devices
        self.first = nn.Linear(in_features, hidden_features).to(devices[0])
        self.second = nn.Linear(hidden_features, hidden_features).to(devices[1])
        self.third = nn.Linear(hidden_features, out_features).to(devices[0])

    def forward(self, inputs):
        hidden = self.second(self.first(inputs).to(self.devices[1]))
        return self.third(hidden.to(self.devices[0]))


class Module(nn.Linear):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"inputs": torch.from_numpy(batch[0].numpy() / 2), "targets": batch[1]}

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch["inputs"]), batch["targets"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Moving(Module):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert batch["inputs"].is_cpu
        return {name: each.to(device) for name, each in batch.items()}
"""
TWO = {"device": [], "cpu": ["launcher.device=cpu"]}
MISUSE = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 4; return 0; }
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["true", "false"])
def test_a_resume_with_other_kernels_has_counts_of_steps_where_they_belong(
    first: str, accelerator: Accelerator
) -> None:
    (accelerator.folder / "places.py").write_text(PLACES)
    own = ["strategy=single", "optimizer=adam", "+callbacks.places._target_=places.Places", "ckpt_path=auto"]
    other = "false" if first == "true" else "true"
    assert accelerator.run(*own, f"optimizer.fused={first}", "trainer.max_steps=4").status == 0
    ended = accelerator.run(*own, f"optimizer.fused={other}", "trainer.max_steps=8")
    assert ended.status == 0, ended.err
    alone = accelerator.run(*own, f"optimizer.fused={other}", "trainer.max_steps=8", name="alone")
    places = [{line.partition("[")[2] for line in each.out.splitlines() if "PLACES" in line} for each in (ended, alone)]
    assert places[0] == places[1]
    assert len(places[0]) == 1


@pytest.mark.slow
def test_ranks_that_see_a_device_each_take_it(pythons_with_devices: dict[int, str], tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ddp_recipes"]
    habits = {**HABITS["all"], "STAGED_ONE_DEVICE": "0"}  # else it is number LOCAL_RANK; NCCL is told which one it is
    own = Accelerator(pythons_with_devices[1], tmp_path)
    ended = own.run("strategy=ddp", ranks=2, habits=habits, command=torchrun)
    assert ended.status == 0, ended.err
    assert ended.summary["world_size"] == 2


@pytest.mark.slow
def test_a_type_that_torch_has_not_is_refused_with_what_it_has(accelerator: Accelerator) -> None:
    ended = accelerator.run("launcher.device=xpu")
    assert ended.status == 2
    assert "launcher.device=xpu is not to be had with this torch" in ended.err
    assert "Allowed: auto, cpu, openreg." in ended.err
    assert not ended.directory.exists()


@pytest.mark.slow
def test_a_backend_that_does_not_take_tensors_of_the_device_is_refused(accelerator: Accelerator) -> None:
    ended = accelerator.run("strategy=ddp", "launcher.backend=gloo", ranks=2)
    assert ended.status == 2
    assert "launcher.backend=gloo takes tensors on cpu, cuda, and this run's are on openreg" in ended.err
    assert "Use launcher.backend=staged (or auto), or launcher.device=cpu." in ended.err
    assert not ended.directory.exists()


@pytest.mark.slow
def test_a_strategy_that_exchanges_copies_on_the_cpu_takes_gloo_by_itself(accelerator: Accelerator) -> None:
    ended = accelerator.run("strategy=parameter_server", ranks=3)
    assert ended.status == 0, ended.err
    assert "parameter_server over gloo" in ended.out
    whole = accelerator.run("strategy=parameter_server", "launcher.device=cpu", ranks=3, name="cpu")
    assert ended.summary["weights_sha256"] == whole.summary["weights_sha256"]
    ended = accelerator.run("strategy=parameter_server", "launcher.backend=staged", ranks=3, name="staged")
    assert ended.status == 2
    assert "Use launcher.backend=gloo (or auto)." in ended.err


@pytest.mark.slow
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(python: str, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("a driver that counts four GPUs is compiled by gcc, which is not installed")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("torch may use the GPUs that are here")
    (tmp_path / "driver.c").write_text(MISUSE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"], cwd=tmp_path, check=True)
    command = [sys.executable, "-m", "ddp_recipes", "data=random", "model=toy", "hydra.run.dir=run"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={"LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2, ended.stderr
    assert "NVIDIA's driver has 4 GPU(s) for this process, and torch" in ended.stderr
    assert "launcher.device=cpu" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["together", "OneByOne"])
def test_data_may_be_on_a_device_already(how: str, accelerator: Accelerator) -> None:
    (accelerator.folder / "held.py").write_text(HELD)

    hashes = set()
    for kind, number in (("cpu", 0), ("openreg", 0), ("openreg", 1)):
        own = [f"data.train._target_=held.{how}", f"+data.train.kind={kind}", f"+data.train.number={number}"]
        ended = accelerator.run("strategy=single", *own, name=f"{kind}_{number}")
        assert ended.status == 0, ended.err
        hashes.add(ended.summary["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.slow
def test_data_workers_that_give_tensors_on_a_device_are_named(accelerator: Accelerator) -> None:
    (accelerator.folder / "held.py").write_text(HELD)
    ended = accelerator.run("data.train._target_=held.OneByOne", "+data.train.kind=openreg", "data.num_workers=1")
    assert ended.status == 1
    assert "data.train gives tensors on openreg:0 in a data worker" in ended.err
    assert "Set data.num_workers=0" in ended.err


@pytest.mark.slow
def test_peak_memory_is_that_of_the_rank_that_takes_most(accelerator: Accelerator) -> None:
    (accelerator.folder / "held.py").write_text(HELD)
    ended = accelerator.run("+callbacks.more._target_=held.More", ranks=2, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    assert ended.summary["peak_memory_bytes"] > 10 << 20
    assert 0 < ended.summary["metrics"]["train/peak_memory_bytes"] <= ended.summary["peak_memory_bytes"]  # of rank 0
    assert re.search(r"^  peak memory +\d\d\.\d MB of a device$", ended.out, re.MULTILINE), ended.out


@pytest.mark.slow
def test_metrics_that_are_modules_are_where_the_outputs_are(accelerator: Accelerator) -> None:
    (accelerator.folder / "own.py").write_text(OWN)
    ended = accelerator.run("strategy=single", "+task.metrics.weighted={_target_: own.Weighted}")
    assert ended.status == 0, ended.err
    assert ended.summary["metrics"]["val/weighted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Module", "Moving"])
def test_hooks_before_a_transfer_get_batches_on_the_host(name: str, accelerator: Accelerator) -> None:
    (accelerator.folder / "own.py").write_text(OWN)
    own = ["task=lightning", "strategy=single", f"model._target_=own.{name}", "~model.hidden_features"]
    device, cpu = (accelerator.run(*own, *more, name=kind) for kind, more in TWO.items())
    assert (device.status, cpu.status) == (0, 0), f"{device.err}\n{cpu.err}"
    assert device.summary["weights_sha256"] == cpu.summary["weights_sha256"]


@pytest.mark.slow
def test_a_model_over_two_devices_may_end_on_the_first(accelerator: Accelerator) -> None:
    (accelerator.folder / "own.py").write_text(OWN)
    own = ["strategy=single", "model._target_=own.Returns", "model.num_devices=2", "trainer.log_every_n_steps=1"]
    device, cpu = (accelerator.run(*own, *more, name=kind) for kind, more in TWO.items())
    assert (device.status, cpu.status) == (0, 0), f"{device.err}\n{cpu.err}"
    assert device.summary["weights_sha256"] == cpu.summary["weights_sha256"]
