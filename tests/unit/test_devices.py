"""What is asked of torch about devices, and what of the driver, as far as no device is needed for it."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddp_recipes import devices
from ddp_recipes.devices import Found, bound_to, memory_of_one, of_gpus, visible


@pytest.mark.parametrize(
    ("build", "platform", "found"),
    [
        ("2.14.1", "linux", of_gpus(4)),
        ("2.14.1+cu130", "linux", of_gpus(4)),
        ("2.14.1+cpu", "linux", of_gpus(4)),  # which a rank refuses then, with torch's reason
        ("2.14.1+rocm6.4", "linux", Found("torch's", 2)),
        ("2.14.1+xpu", "linux", Found("torch's", 2)),
        ("2.14.1", "darwin", Found("torch's", 2)),
    ],
)
def test_torch_is_asked_where_it_is_here_for_other_devices_than_those_of_nvidias_driver(
    build: str, platform: str, found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "version", {"torch": build}.__getitem__)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(devices, "_of_driver", lambda: 4)
    monkeypatch.setattr(devices, "known_to_torch", lambda asked: Found("torch's", 2))
    assert visible("auto") == found
    assert visible("cuda") == found  # as torch calls those of ROCm, too
    assert visible("npu") == Found("torch's", 2)
    assert visible("cpu") == Found("cpu", 0)


@pytest.mark.parametrize(("backend", "bound"), [("nccl", True), ("nccl-legacy", True), ("xccl", True), ("gloo", False)])
def test_a_group_is_bound_to_the_one_device_of_a_replica(backend: str, bound: bool) -> None:
    own = [torch.device("cuda", number) for number in (2, 3)]
    assert bound_to(backend, own[:1]) == (own[0] if bound else None)
    assert bound_to(backend, own) is None


class Properties:
    total_memory = 80


class OfOneType:
    """As ``torch.cuda``, of a type of device."""

    def get_device_properties(self, number: int) -> Properties:
        return Properties()


def raises(*given: Any) -> Any:
    raise NotImplementedError("getMemoryInfo is not implemented for this allocator yet.")


@pytest.mark.parametrize(
    ("kind", "info", "of_type", "bytes_"),
    [
        ("cuda", lambda number: (60, 80), OfOneType(), 60),
        ("cuda", raises, OfOneType(), 80),
        ("npu", raises, object(), None),
        ("cpu", lambda number: (60, 80), OfOneType(), None),
    ],
    ids=["free", "total", "not known", "host"],
)
def test_the_memory_of_a_device_is_what_is_free_or_what_it_has(
    kind: str, info: Callable[[int], Any], of_type: object, bytes_: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", info)
    monkeypatch.setattr(devices, "module", lambda kind: of_type)
    assert memory_of_one(kind) == bytes_
