"""How runs end on a simulated accelerator, over groups with NCCL's habits: soon, and with what happened."""

import time
from signal import SIGKILL, SIGTERM

import pytest

from helpers.accelerator import HABITS, Accelerator, disturbed
from helpers.marks import slow_but
from helpers.patience import patience

BREAKING = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_recipes import Callback


class Broken(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(each, torch.Tensor) and each.device.type == "openreg" for each in flat):
            raise RuntimeError("device-side assert triggered, as every call of the device says from now on")
        return func(*args, **(kwargs or {}))


def leave(*_):
    raise RuntimeError("device-side assert triggered, as the end of a communicator says, too")


class Breaking(Callback):
    def on_step(self, step):
        if step == 2:
            Broken().__enter__()
            torch.distributed.destroy_process_group = leave
            torch.zeros(1, device="openreg") + 1
"""
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "ddp_exact": ["strategy=ddp_exact"],
    "fsdp": ["strategy=fsdp", "strategy.wrap=[net1,net2]"],
    "ddp_pipeline": ["strategy=ddp_pipeline"],
}
TIMEOUT_S = 60  # of a collective; no end may wait for it
ENDS_S = 25  # to start, two steps, and the end
LIMIT = f"launcher.timeout_s={TIMEOUT_S}"
SAMPLES = "data.num_samples=640"  # of which ddp_exact takes 96 a step


CASES = [(name, rank) for name in STRATEGIES for rank in (0, 1)]


@pytest.mark.parametrize(("name", "rank"), slow_but([], CASES, CASES[::4]))
def test_an_exception_on_one_rank_is_shown_soon(name: str, rank: int, accelerator: Accelerator) -> None:
    own = [*STRATEGIES[name], LIMIT, disturbed(accelerator.folder, "raise", rank)]
    began = time.monotonic()
    ended = accelerator.run(*own, ranks=2, habits=HABITS["all"])
    assert time.monotonic() - began < patience(ENDS_S)
    assert ended.status == 1
    assert "ValueError: the cat sat on the keyboard" in ended.err
    assert "the cat sat on the keyboard" in ended.summary["error"], ended.err
    assert ended.summary["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_killed_rank_is_named_soon(name: str, accelerator: Accelerator) -> None:
    own = [*STRATEGIES[name], LIMIT, disturbed(accelerator.folder, int(SIGKILL))]
    began = time.monotonic()
    ended = accelerator.run(*own, ranks=2, habits=HABITS["all"])
    assert time.monotonic() - began < patience(ENDS_S)
    assert ended.status == 1
    assert "Rank 1" in ended.err
    assert "was killed by SIGKILL" in ended.err
    assert ended.summary["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_a_device_that_comes_again_with_every_call_is_shown(ranks: int, accelerator: Accelerator) -> None:
    strategy = "strategy=single" if ranks == 1 else "strategy=ddp"
    (accelerator.folder / "breaking.py").write_text(BREAKING)
    own = [strategy, LIMIT, "+callbacks.breaking._target_=breaking.Breaking"]
    ended = accelerator.run(*own, ranks=ranks, habits=HABITS["all"])
    assert ended.status == 1
    assert "in on_step" in ended.err
    assert "RuntimeError: device-side assert triggered" in ended.err
    assert "An index is out of range on the GPU" in ended.summary["error"]
    assert "the end of a communicator" not in ended.err
    assert ended.summary["status"] == "failed"


@pytest.mark.parametrize("name", slow_but([], STRATEGIES, ["fsdp"]))
def test_a_run_that_is_told_to_stop_saves_and_goes_on(name: str, accelerator: Accelerator) -> None:
    own = [*STRATEGIES[name], SAMPLES, LIMIT, "ckpt_path=auto"]
    stopped = accelerator.run(*own, disturbed(accelerator.folder, int(SIGTERM), rank=0), ranks=2, habits=HABITS["all"])
    assert stopped.status == 75, stopped.err
    assert stopped.summary["status"] == "preempted"
    ended = accelerator.run(*own, ranks=2, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    whole = accelerator.run(*STRATEGIES[name], SAMPLES, ranks=2, name="whole")
    assert ended.summary["weights_sha256"] == whole.summary["weights_sha256"]


SPOILING = """
import os

from ddp_recipes import Callback


class Spoiling(Callback):
    def on_save(self, step):
        if os.environ["RANK"] == "1":
            self.run.task.register_state_dict_pre_hook(self.spoil)

    def spoil(self, *_):
        raise ValueError("the cat sat on the keyboard")
"""


@pytest.mark.slow
def test_what_fails_once_a_run_that_is_told_to_stop_is_saved_is_shown_soon(accelerator: Accelerator) -> None:
    (accelerator.folder / "spoiling.py").write_text(SPOILING)
    own = [*STRATEGIES["fsdp"], SAMPLES, LIMIT, "+callbacks.spoiling._target_=spoiling.Spoiling"]
    began = time.monotonic()
    ended = accelerator.run(*own, disturbed(accelerator.folder, int(SIGTERM), rank=0), ranks=2, habits=HABITS["all"])
    assert time.monotonic() - began < patience(ENDS_S)
    assert ended.status == 1
    assert "in spoil" in ended.err
    assert "the cat sat on the keyboard" in ended.summary["error"], ended.err
    assert ended.summary["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but([], ["ddp", "ddp_exact", "fsdp"], ["ddp", "fsdp"]))
def test_a_lost_rank_is_replaced(name: str, accelerator: Accelerator) -> None:
    own = [*STRATEGIES[name], LIMIT, "launcher.replace_ranks=1"]
    ended = accelerator.run(*own, disturbed(accelerator.folder, int(SIGKILL)), ranks=2, habits=HABITS["all"])
    assert ended.status == 0, ended.err
    if name == "fsdp":
        assert "No rank has all that the lost one had: all start again, from step 0." in ended.err
    else:
        assert ended.summary["ranks_replaced"] == 1
    whole = accelerator.run(*STRATEGIES[name], ranks=2, name="whole")
    assert ended.summary["weights_sha256"] == whole.summary["weights_sha256"]


EXHAUSTED = """
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from ddp_recipes import Callback

ENTRIES = []
if Path("says").exists():  # this type of device has what cuda and xpu have
    torch.get_device_module("openreg").memory = SimpleNamespace(
        _record_memory_history=lambda max_entries: ENTRIES.append(max_entries),
        _dump_snapshot=lambda path: Path(path).write_text(f"{ENTRIES}"),
    )


class Exhausted(Callback):
    def on_step(self, step):
        if step == 2:
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")
"""


@pytest.mark.slow
@pytest.mark.parametrize("says", [True, False])
def test_a_rank_without_memory_leaves_a_snapshot_where_its_device_can(says: bool, accelerator: Accelerator) -> None:
    (accelerator.folder / "exhausted.py").write_text(EXHAUSTED)
    if says:
        (accelerator.folder / "says").touch()
    own = ["+callbacks.exhausted._target_=exhausted.Exhausted", "callbacks=memory_history"]
    ended = accelerator.run("strategy=single", *own)
    assert ended.status == 1
    assert "Out of memory. Make data.batch_size" in ended.err
    left = ended.directory / "ranks" / "memory_0.pickle"
    assert left.exists() == says
    assert (f"What was allocated is in {left}" in ended.err) == says
    if says:
        assert left.read_text() == "[100000]"


DOORS = """
from pathlib import Path
from socket import socket

from ddp_recipes import Callback
from ddp_recipes.runtime.process import listens, sockets


class Knocking(Callback):
    def on_step(self, step):
        found = []
        for door in [each.getsockname() for each in sockets() if listens(each)]:
            with socket() as visitor:
                visitor.settimeout(1)
                found.append(visitor.connect_ex(("127.0.0.1", door[1])) == 0)
        Path("doors").write_text(" ".join(map(str, found)))
"""


@pytest.mark.parametrize(("device", "opens"), [("openreg", True), ("cpu", False)])
def test_a_group_that_connects_later_finds_its_own_sockets_open(
    device: str, opens: bool, accelerator: Accelerator
) -> None:
    """NCCL connects to itself in its first collective and as it is left, gloo only while ranks meet."""
    (accelerator.folder / "doors.py").write_text(DOORS)
    own = ["strategy=ddp_exact", "+callbacks.doors._target_=doors.Knocking", "trainer.max_steps=1"]
    ended = accelerator.run(*own, f"launcher.device={device}", ranks=2)
    assert ended.status == 0, ended.err
    assert (accelerator.folder / "doors").read_text() == str(opens)
