"""What keeps aborted collectives from being used, as far as no GPU is needed for it."""

import os
from threading import Barrier, Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from ddp_recipes._compat.messages import lost_a_rank
from ddp_recipes.data.loader import Loader
from ddp_recipes.data.order import BatchPlan, Sequential
from ddp_recipes.errors import RequestError
from ddp_recipes.strategies import exchanges as module, group as of_groups
from ddp_recipes.strategies.ddp.settings import DDPSettings
from ddp_recipes.strategies.ddp.strategy import DDP
from ddp_recipes.strategies.exchanges import HANDLING, SETTINGS, Exchanges, leave_failures_to_us
from helpers.patience import patience


def test_what_was_aborted_is_reported_as_a_lost_rank() -> None:
    aborted: list[str] = []
    exchanges = Exchanges([torch.device("cpu")], 1.0, lambda: aborted.append("all"))
    exchanges.synchronize()
    exchanges.end()
    assert (exchanges.lost, aborted) == (True, ["all"])
    with pytest.raises(dist.DistBackendError, match="aborted") as raised:
        exchanges.synchronize()
    assert lost_a_rank(raised.value)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("NCCL communicator was aborted after a previous error", True),
        ("NCCL Async Error: remote process exited or there was a network error", True),
        ("NCCL AllReduce failed: invalid argument", True),
        ("NCCL operation timed out", True),
        ("Cannot use ReduceOp.BAND with NCCL", False),
    ],
)
def test_errors_after_an_abort_are_told_from_ones_own(text: str, lost: bool) -> None:
    assert lost_a_rank(RuntimeError(text)) == lost


def test_where_collectives_raise_by_themselves_nothing_is_aborted() -> None:
    exchanges = Exchanges()
    exchanges.end()
    exchanges.synchronize()
    assert not exchanges.lost


def test_settings_of_nccl_are_not_set_over_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    leave_failures_to_us()
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_torch_may_not_abort_collectives_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "2")
    with pytest.raises(RequestError, match=f"{HANDLING}=2 .* Leave the variable out"):
        leave_failures_to_us()


def test_a_device_that_takes_no_more_work_is_one_that_comes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU on which a thousand kernels wait: the call by which it would be asked waits as well."""
    goes_on, aborted = Event(), Event()

    def waits(device: torch.device) -> None:
        goes_on.wait()
        raise RuntimeError("aborted")

    monkeypatch.setattr(module, "record", waits)
    exchanges = Exchanges([torch.device("cuda", 0)], 0.2, aborted.set, settles=False)
    assert aborted.wait(patience(20))
    assert exchanges.late
    goes_on.set()
    with pytest.raises(dist.DistBackendError, match=r"Timed out waiting 0\.2 s"):
        exchanges.synchronize()


class EndsWithTheOther:
    """A process group that ends once the other one does, whose kernels the device runs before its own."""

    def __init__(self, both: Barrier) -> None:
        self.both, self.ended = both, False

    def abort(self) -> None:
        self.both.wait(patience(5))
        self.ended = True


def test_groups_are_aborted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2)
    groups = [EndsWithTheOther(both), EndsWithTheOther(both)]
    monkeypatch.setattr(of_groups, "every_group", lambda: groups)
    group = DDP(DDPSettings())
    group.abort()
    assert [each.ended for each in groups] == [True, True]
    assert not group.stuck


def test_a_group_that_does_not_end_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2)
    monkeypatch.setattr(of_groups, "every_group", lambda: [EndsWithTheOther(both)])
    monkeypatch.setattr(of_groups, "ABORT_S", 0.1)
    group = DDP(DDPSettings())
    group.abort()
    assert group.stuck
    both.wait(patience(5))


class Remote(TensorDataset):
    """Is in a store that fails in words that collectives fail in."""

    def __init__(self, text: str) -> None:
        super().__init__(torch.zeros(4, 1))
        self.text = text

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError(self.text)


@pytest.mark.parametrize("text", ["the store timed out", "Connection reset by peer"])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_data_set_waits_for_is_no_other_rank(workers: int, text: str) -> None:
    loader = Loader(Remote(text), BatchPlan(Sequential(4), 2), torch.device("cpu"), num_workers=workers)
    with pytest.raises(RuntimeError, match=text) as raised:
        next(loader.batches(0))
    loader.close()
    assert not lost_a_rank(raised.value)
    assert lost_a_rank(RuntimeError(text))
