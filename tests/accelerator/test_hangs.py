"""A device that comes no further, as one that waits in a collective of NCCL's for a lost rank, ends a run in time."""

import json
import time

import pytest
import torch

from ddp_recipes.strategies.exchanges import SETTINGS
from ddp_recipes.strategies.group import ABORT_S
from helpers.accelerator import HABITS, Accelerator
from helpers.patience import patience, timeout_s

PARTS = """
import ctypes
import os
from signal import SIGSTOP

import torch

from ddp_recipes import Callback
from ddp_recipes.strategies import DDP, DDPSettings

DONE = 40 + 48  # bytes: where an event of OpenReg's has whether its device came by, behind a mutex and a condition
held = []


def hang(device):
    # Have a device wait for an event that never comes.
    event = torch.Event(device)
    event.record()
    event.synchronize()
    at = ctypes.c_void_p.from_address(event.event_id).value
    ctypes.c_bool.from_address(at + DONE).value = False
    torch.accelerator.current_stream(device).wait_event(event)
    held.append((event, at))


def free():
    while held:
        _, at = held.pop()
        ctypes.c_bool.from_address(at + DONE).value = True
        ctypes.CDLL(None).pthread_cond_broadcast(ctypes.c_void_p(at + 40))


class AbortedSettings(DDPSettings):
    pass


class Aborted(DDP):
    def abort(self):
        super().abort()
        free()


class Hanging(Callback):
    def on_step(self, step):
        if step != 2:
            return
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), SIGSTOP)
        hang("openreg")
        torch.accelerator.synchronize()  # as any code does that needs a value
"""


@pytest.mark.slow
def test_a_rank_for_which_the_device_of_another_waits_is_named(accelerator: Accelerator) -> None:
    limit = timeout_s()
    (accelerator.folder / "parts.py").write_text(PARTS)
    own = ["strategy._target_=parts.Aborted", f"launcher.timeout_s={limit}", "+callbacks.own._target_=parts.Hanging"]
    began = time.monotonic()
    ended = accelerator.run(*own, ranks=2, habits=HABITS["a lost rank is waited for"])
    assert time.monotonic() - began < patience(2 * limit + 20)  # this group takes as long again to fail once aborted
    assert ended.status == 1, ended.err
    assert f"Rank 1 of 2 did not respond within launcher.timeout_s={limit} seconds" in ended.err
    assert "Rank 1 of 2 did not respond" in ended.summary["error"]
    assert (ended.directory / "ranks" / "flight_recorder_0.json").exists()


NCCL = """
import json
import os
from pathlib import Path
from threading import Event

import openreg_device
import torch.distributed as dist

from ddp_recipes import Callback
from ddp_recipes.strategies import DDP, DDPSettings

staged = openreg_device.make_group(dist)


def make(*arguments):
    group = staged(*arguments)
    group.supports_splitting = False
    return group


dist.Backend.register_backend("nccl-staged", make, devices=["openreg", "cpu"])


class OverSettings(DDPSettings):
    pass


class Over(DDP):
    pass


class StuckSettings(DDPSettings):
    pass


class Stuck(DDP):
    def setup(self, *arguments):
        super().setup(*arguments)
        dist.new_group([0, 1]).abort = Event().wait  # for ever


class Raising(Callback):
    def on_step(self, step):
        if os.environ["RANK"] == "1" and step == 2:
            raise ValueError("the cat sat on the keyboard")


class Environment(Callback):
    def on_step(self, step):
        names = [name for name in os.environ if name.startswith("TORCH_NCCL")]
        Path(f"environ_{os.environ['RANK']}").write_text(json.dumps({name: os.environ[name] for name in names}))
"""


@pytest.mark.slow
def test_over_nccl_no_thread_of_torchs_ends_a_rank_unless_the_user_has_it(accelerator: Accelerator) -> None:
    """Over what is called one of torch's ways to NCCL, and is none."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL, and refuses a backend that is called so")
    (accelerator.folder / "nccl.py").write_text(NCCL)
    own = ["strategy._target_=nccl.Over", "launcher.backend=nccl-staged", "+callbacks.own._target_=nccl.Environment"]
    kept = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    ended = accelerator.run(*own, ranks=2, **kept)
    assert ended.status == 0, ended.err
    for rank in (0, 1):
        assert json.loads((accelerator.folder / f"environ_{rank}").read_text()) == SETTINGS | kept
    ended = accelerator.run(*own, ranks=2, name="refused", TORCH_NCCL_ASYNC_ERROR_HANDLING="2")
    assert ended.status == 2, ended.err
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=2 has torch abort collectives without an error" in ended.err


@pytest.mark.nightly
def test_a_group_that_cannot_be_aborted_keeps_no_rank_from_saying_what_failed(accelerator: Accelerator) -> None:
    (accelerator.folder / "nccl.py").write_text(NCCL)
    own = ["strategy._target_=nccl.Stuck", "+callbacks.own._target_=nccl.Raising", "launcher.timeout_s=300"]
    began = time.monotonic()
    ended = accelerator.run(*own, ranks=2, habits=HABITS["all"])
    assert time.monotonic() - began < patience(ABORT_S + 40)
    assert ended.status == 1
    assert "ValueError: the cat sat on the keyboard" in ended.err
    assert "the cat sat on the keyboard" in ended.summary["error"]
