"""What each server holds, and the messages about it."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

# Tags: a message of one kind does not wait for those of another. DEAL plus a worker's rank is about that worker.
ASK, WEIGHTS, GRADIENTS, SUM, DEAL = range(5)
ANY = -1  # in place of a shard: whichever is free
_ALIGNED = 16  # bytes, so that any dtype can begin there


def copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors into others."""
    for place, value in zip(into, values, strict=True):
        place.detach().copy_(value.detach())


class Parcel:
    """One message with room for such tensors, of any dtypes and devices; ``tensors`` are views of its bytes."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        ends = list(accumulate((-(-each.nbytes // _ALIGNED) * _ALIGNED for each in like), initial=0))
        self.message = torch.zeros(max(ends[-1], _ALIGNED), dtype=torch.uint8)
        self.tensors = [
            self.message[start : start + each.nbytes].view(each.dtype).view(each.shape)
            for start, each in zip(ends, like, strict=False)
        ]


class Served:
    """Parameters that one server holds; the first server holds the module's buffers as well."""

    def __init__(self, parameters: Sequence[nn.Parameter], module: nn.Module | None) -> None:
        self.parameters, self._module = parameters, module
        self._parcel = Parcel([*parameters, *self.buffers])
        self.message = self._parcel.message  # of their values

    @property
    def buffers(self) -> Sequence[Tensor]:
        """Buffers that the module has now: a forward pass may put others in their place."""
        return [] if self._module is None else list(self._module.buffers())

    def pack(self) -> Tensor:
        """Return the message, with the values as they are now."""
        copy(self._parcel.tensors, [*self.parameters, *self.buffers])
        return self.message

    def unpack(self) -> None:
        """Take the values of a message that was received."""
        copy([*self.parameters, *self.buffers], self._parcel.tensors)


class Push:
    """What a worker sends a server for a shard of a batch: gradients and buffers, after the forward and backward."""

    def __init__(self, served: Served) -> None:
        self._served = served
        facts = torch.zeros(1 + len(served.parameters), dtype=torch.float64)
        parcel = Parcel([facts, *served.parameters, *served.buffers])
        self.message = parcel.message
        # The shard's fraction of the samples of its step, and for each parameter whether it has a gradient.
        self._facts, self._values = parcel.tensors[0], parcel.tensors[1:]

    def fill(self, weight: float) -> Tensor:
        """Return the message, with gradients taken out of the parameters."""
        there = [parameter.grad is not None for parameter in self._served.parameters]
        self._facts.copy_(torch.tensor([weight, *there], dtype=torch.float64))
        for place, parameter in zip(self._values, self._served.parameters, strict=False):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                parameter.grad = None
        copy(self.buffers, self._served.buffers)
        return self.message

    @property
    def weight(self) -> float:
        """The shard's fraction of the samples of its step."""
        return float(self._facts[0])

    @property
    def buffers(self) -> Sequence[Tensor]:
        """As the shard left them."""
        return self._values[len(self._served.parameters) :]

    def gradient(self, at: int) -> Tensor | None:
        """Return the gradient of a parameter, or ``None`` if the shard has none."""
        return self._values[at] if self._facts[1 + at] else None


def deal(module: nn.Module, servers: int) -> list[Served]:
    """Return what each server holds: whole parameters, the largest first, each to the server that has least."""
    parameters = list(module.parameters())
    held: list[list[int]] = [[] for _ in range(servers)]
    for at in sorted(range(len(parameters)), key=lambda at: -parameters[at].numel()):
        min(held, key=lambda mine: sum(parameters[other].numel() for other in mine)).append(at)
    return [Served([parameters[at] for at in sorted(mine)], None if n else module) for n, mine in enumerate(held)]
