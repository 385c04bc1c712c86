"""What is on accelerators, copied to the host for a checkpoint that is written while training goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_recipes import devices
from ddp_recipes._compat.pytree import tree_flatten, tree_unflatten
from ddp_recipes._compat.tensors import bytes_of, storage_key

_APART = 64  # bytes: where a tensor of any dtype may begin


@dataclass(frozen=True)
class Content:
    """What is to be written.

    Attributes:
        value: nested plain data and tensors.
        events: that devices come by once the copies of what is on them are there; none where nothing was copied.
    """

    value: Any
    events: Sequence[torch.Event] = ()

    def wait(self) -> None:
        """Wait until the copies are there; any thread may."""
        for event in self.events:
            event.synchronize()


class HostCopies:
    """Keeps page-locked memory from checkpoint to checkpoint, into which devices copy without anyone waiting for them.

    Copies are enqueued behind what a device has to do already, and before the next step's work: so whatever code writes
    to a tensor from now on, its copy has the value of now. The device itself is held up for as long as they take.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, value: Any) -> Content:
        """Begin to copy nested plain data and tensors to the host. The copies of the time before are overwritten.

        Nothing is copied where nothing of it is on an accelerator.
        """
        leaves, structure = tree_flatten(value)
        away = {_place(each): each for each in leaves if _is_away(each)}
        if not away:
            return Content(value)
        copies = self._copied(away)
        taken = [
            copies[_place(each)] if _is_away(each) else each.clone() if isinstance(each, Tensor) else each
            for each in leaves
        ]
        return Content(
            tree_unflatten(taken, structure),
            [devices.record(device) for device in {each.device for each in away.values()}],
        )

    def _copied(self, away: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Return a copy of each tensor, which is to come, in a storage of its own: ``torch.save`` writes whole ones."""
        sizes = [-(-each.nbytes // _APART) * _APART for each in away.values()]
        if sum(sizes) > len(self._memory):
            self._memory = devices.page_locked(sum(sizes))
        room: Any = self._memory.numpy()
        begin, copies = 0, {}
        for (place, each), size in zip(away.items(), sizes, strict=True):
            copy = torch.empty(0, dtype=torch.uint8)
            if each.nbytes:
                copy = torch.frombuffer(room, dtype=torch.uint8, count=each.nbytes, offset=begin)
                copy.copy_(bytes_of(each), non_blocking=True)
            copies[place] = copy.view(each.dtype).view(each.shape)
            begin += size
        return copies


def _is_away(value: Any) -> bool:
    return isinstance(value, Tensor) and devices.is_accelerator(value.device)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tensors have in common that are one, such as tied weights."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
