"""A sum over shards in one fixed order, whoever computed them: the same bits on any number of ranks.

What a shard leaves (gradients, buffers) becomes a row of numbers. Rank w owns the w-th slice of every row: it gets that
slice of all rows (all-to-all), adds them in the order of the shards, and gives the result to every rank (all-gather).
With p shards on each of several ranks, a rank sends p + 1 rows in a step, less what stays with itself. One rank adds up
in place.

What is missing in a row (a parameter that the shard did not use, a shard without a sample) is -0.0: added to any
number, 0.0 and -0.0 included, it leaves that number as it is.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import add_each, buffers_of, copy_each
from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Collective, Exchange
from ddp_recipes.strategies.exchanges import exchanged, wait
from ddp_recipes.strategies.group import Group
from ddp_recipes.tasks.written import Watch

_ALIGNMENT = 64  # bytes: as torch aligns new tensors, so that kernels treat a view like one of those
_TOGETHER = 1 << 19  # bytes: rows are sent several at a time up to this size, for each message has a price of its own


class OrderedSum:
    """Takes what each shard leaves as it is done; then leaves the sum over all shards of all ranks in its place.

    Gradients are added. Every shard starts from the buffers that the step started from; at its end a floating-point
    buffer has moved by the mean of its moves in all shards, weighted by their samples (one that was infinite is the
    mean of what shards left), and any other is shard 0's.

    Args:
        module: what has the gradients and buffers. Parameters that need no gradient are left out for good.
        shards: how many of them each rank computes. Ranks take turns: the first ``world_size`` shards are the first of
            each rank.
        parameters: whose gradients are added; ``None``: those of all.
    """

    def __init__(
        self, module: nn.Module, world: World, shards: int, parameters: Sequence[Tensor] | None = None
    ) -> None:
        self.world = world
        self.shards = shards
        self.done = 0  # shards of this step
        every = [*module.parameters()]  # asked for once: a shard of a small model takes less time than the walk
        self.watch = Watch(module, lambda: every)
        parameters = [each for each in (every if parameters is None else parameters) if each.requires_grad]
        buffers = _Buffer.all_of(module)
        self.shapes = [(buffer, buffer.tensor.shape) for buffer in buffers]
        buffers = [buffer for buffer in buffers if buffer.tensor.numel()]
        moving = [buffer for buffer in buffers if buffer.moves]
        others = [buffer for buffer in buffers if not buffer.moves]
        self.kinds: list[_Rows | _Firsts] = [
            *(_Rows(*alike, world, shards) for alike in _alike(parameters, moving)),
            *(_Firsts(alike, world) for _, alike in _alike([], others)),
        ]

    def begin(self) -> None:
        """Begin a shard."""
        self._check()
        for kind in self.kinds:
            kind.begin(self.done)
        self.watch.begin()

    def take(self, weight: float) -> None:
        """Take what a shard left; ``weight`` is its fraction of the step's samples."""
        self._check()
        self.watch.end()
        for kind in self.kinds:
            kind.take(self.done, weight)
        self.done += 1

    def _check(self) -> None:
        for buffer, shape in self.shapes:
            if buffer.tensor.shape != shape:
                raise RunFailed(
                    f"The buffer {buffer.name} was of shape {list(shape)} and is now of {list(buffer.tensor.shape)}. A "
                    f"strategy with shards adds up what each of them does to a buffer, which so must keep its shape. "
                    f"Make it of its last one from the start, or choose strategy=ddp."
                )

    def reduce(self) -> None:
        """Leave the sums in ``grad`` and in the buffers; ``grad`` stays ``None`` where no shard of any rank had one."""
        assert self.done == self.shards, f"{self.done} of {self.shards} shards are done"
        self.done = 0
        for kind in self.kinds:
            kind.reduce()

    def exchange(self) -> Exchange:
        """Return what is kept and sent."""
        rows = [kind for kind in self.kinds if isinstance(kind, _Rows)]
        pairs = [pair for kind in rows for pair in zip(kind.parameters, kind.total.gradients, strict=True)]
        all_, firsts = range(self.world.world_size), [kind for kind in self.kinds if isinstance(kind, _Firsts)]
        return Exchange(
            held=[tensor for kind in self.kinds for tensor in kind.held()],
            places={parameter: place for parameter, place in pairs if isinstance(parameter, nn.Parameter)},
            at_once=False,
            sent=[
                Collective("scattered", sum(self.shards * kind.total.flat.nbytes for kind in rows), all_),
                Collective("gathered", sum(kind.slice.nbytes for kind in rows), all_),
                Collective("broadcast", sum(kind.first.nbytes for kind in firsts), all_),
            ]
            if len(all_) > 1
            else (),
        )


class _Buffer:
    """Where a module keeps a buffer: it may put another tensor there at any time."""

    def __init__(self, owner: dict[str, Tensor | None], key: str, name: str) -> None:
        self.owner, self.key, self.name = owner, key, name

    @property
    def moves(self) -> bool:
        """Whether there is a mean of it: a number of 8 bits cannot be added up."""
        return self.tensor.is_floating_point() and self.tensor.itemsize > 1

    @property
    def tensor(self) -> Tensor:
        tensor = self.owner[self.key]
        assert tensor is not None
        return tensor.detach()

    @classmethod
    def all_of(cls, module: nn.Module) -> list["_Buffer"]:
        """Return each buffer once, also one that several modules have."""
        found = {
            id(tensor): cls(buffers_of(each), key, f"{name}.{key}".lstrip("."))
            for name, each in module.named_modules()
            for key, tensor in buffers_of(each).items()
            if tensor is not None
        }
        return list(found.values())


def _alike(parameters: Sequence[Tensor], buffers: Sequence[_Buffer]) -> Iterator[tuple[list[Tensor], list[_Buffer]]]:
    """Yield those of one dtype on one device together, in the order in which the kinds come up."""

    def kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
        return tensor.dtype, tensor.device

    for one in dict.fromkeys([*map(kind, parameters), *(kind(buffer.tensor) for buffer in buffers)]):
        yield [each for each in parameters if kind(each) == one], [each for each in buffers if kind(each.tensor) == one]


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return where each tensor starts in a flat one, and where the last one ends."""
    return [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT // tensor.itemsize for tensor in tensors)]


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the place of each tensor in a flat one, in its shape; one that is channels-last lies so there, too."""
    places = [flat[at : at + tensor.numel()] for at, tensor in zip(_starts(tensors), tensors, strict=False)]
    return [
        place.as_strided(tensor.shape, tensor.stride())
        if tensor.is_contiguous(memory_format=torch.channels_last)
        else place.view(tensor.shape)
        for place, tensor in zip(places, tensors, strict=True)
    ]


class _Row:
    """What a shard leaves: gradients, then 1 for each parameter that has one, then how far buffers have moved.

    Args:
        flat: [size], of -0.0.
        moves: numbers in the buffers, which lie as they do in a flat tensor of their own.
    """

    def __init__(self, flat: Tensor, parameters: Sequence[Tensor], moves: int) -> None:
        tensors = [*parameters, flat.new_empty(len(parameters)), flat.new_empty(moves)]
        self.flat, (*self.gradients, self.used, self.moves) = flat, _views(flat, tensors)


class _Rows:
    """Gradients and floating-point buffers of one dtype on one device."""

    def __init__(self, parameters: list[Tensor], buffers: list[_Buffer], world: World, shards: int) -> None:
        self.parameters, self.buffers, self.world, self.shards = parameters, buffers, world, shards
        tensors = [buffer.tensor for buffer in buffers]
        first, moves = [*parameters, *tensors][0], _starts(tensors)[-1]
        size = _starts([*parameters, first.new_empty(len(parameters)), first.new_empty(moves)])[-1]
        ranks, width = world.world_size, -(-size // world.world_size)  # of a slice
        self.together = min(shards, max(1, _TOGETHER // (size * first.itemsize)))
        numbers = [min(self.together, shards - at) for at in range(0, shards, self.together)]

        def zeros(*shape: int) -> Tensor:
            return first.new_full(shape, -0.0)

        self.start, self.end = zeros(moves), zeros(moves)  # the buffers at the start of a step, at the end of a shard
        self.started, self.ended = _views(self.start, tensors), _views(self.end, tensors)
        self.total = _Row(zeros(ranks * width), parameters, moves)
        self.unused: set[int] = set()  # parameters that no shard of this rank has a gradient of, in this step
        if ranks > 1:
            self.rows = zeros(self.together, ranks, width)
            self.row = [_Row(row.view(-1), parameters, moves) for row in self.rows]
            self.received = [zeros(ranks, number, width) for number in numbers]  # this rank's slice of every row
            self.slice = zeros(width)  # their sum
            self.sending: list[tuple[dist.Work, Tensor]] = []

    def held(self) -> list[Tensor]:
        """Return what is kept from step to step."""
        alone = [self.start, self.end, self.total.flat]
        return alone if self.world.world_size == 1 else [*alone, self.rows, *self.received, self.slice]

    def begin(self, number: int) -> None:
        """Note the buffers before the first shard of a step; put them back before any other."""
        if self.buffers:
            tensors = [buffer.tensor for buffer in self.buffers]
            copy_each(*((self.started, tensors) if number == 0 else (tensors, self.started)))

    def take(self, number: int, weight: float) -> None:
        """Fill a row, and send it once there are as many as go together; or add to the total, on a single rank."""
        if self.world.world_size == 1:
            self._fill(self.total, number, weight, add=number > 0)
            return
        at = number % self.together
        if at == 0:
            self._wait()  # rows may still be read
        self._fill(self.row[at], number, weight, add=False)
        if at == self.together - 1 or number == self.shards - 1:
            rows = self.rows[: at + 1].transpose(0, 1).contiguous()  # slices by rank; a single row is not copied
            work = dist.all_to_all_single(self.received[number // self.together], rows, async_op=True)
            assert work is not None
            self.sending.append((work, rows))

    def _fill(self, row: _Row, number: int, weight: float, add: bool) -> None:
        """Put gradients and moves into a row, or add them to what is there."""
        gradients = {at: each.grad for at, each in enumerate(self.parameters) if each.grad is not None}
        unused = set(range(len(self.parameters))) - gradients.keys()
        self.unused = unused if number == 0 else self.unused & unused
        if not add:
            row.used.fill_(1)
            for at in unused:
                row.gradients[at].fill_(-0.0)
                row.used[at] = 0
        if gradients:
            put = add_each if add else copy_each
            put([row.gradients[at] for at in gradients], list(gradients.values()))
        for parameter in self.parameters:
            parameter.grad = None
        if self.buffers:
            copy_each(self.ended, [buffer.tensor for buffer in self.buffers])
            start = _finite(self.start)
            moves = torch.where(self.end == start, -0.0, (self.end - start) * weight)
            moves = moves if weight else moves.fill_(-0.0)
            row.moves.add_(moves) if add else row.moves.copy_(moves)

    def _wait(self) -> None:
        for work, rows in self.sending:
            wait(work, rows)
        self.sending = []

    def reduce(self) -> None:
        """Add the rows up, and put the sums in place."""
        if self.world.world_size > 1:
            self._wait()
            self.slice.fill_(-0.0)
            for rows in self.received:
                for of_ranks in rows.transpose(0, 1):
                    for row in of_ranks:
                        self.slice.add_(row)
            all_gather_single(self.total.flat, self.slice)
        if self.unused and self.world.world_size > 1:  # only then: on a GPU this waits
            used = self.total.used.tolist()
            self.unused = {at for at in self.unused if used[at] == 0}
        for at, (parameter, gradient) in enumerate(zip(self.parameters, self.total.gradients, strict=True)):
            parameter.grad = None if at in self.unused else gradient
        if self.buffers:
            torch.add(_finite(self.start), self.total.moves, out=self.start)
            copy_each([buffer.tensor for buffer in self.buffers], self.started)


def _finite(start: Tensor) -> Tensor:
    """Return where moves are measured from: from an infinite number there is no way to a mean, so from 0."""
    return torch.where(start.isfinite(), start, 0.0)


class _Firsts:
    """Buffers of one dtype on one device that have no mean, such as counts: a step leaves those of shard 0."""

    def __init__(self, buffers: list[_Buffer], world: World) -> None:
        self.buffers, self.world = buffers, world
        tensors = [buffer.tensor for buffer in buffers]
        size = _starts(tensors)[-1]
        self.start, self.first = tensors[0].new_zeros(size), tensors[0].new_zeros(size)
        self.started, self.firsts = _views(self.start, tensors), _views(self.first, tensors)

    def held(self) -> list[Tensor]:
        """Return what is kept from step to step."""
        return [self.start, self.first]

    def begin(self, number: int) -> None:
        """Note them before the first shard of a step; put them back before any other."""
        tensors = [buffer.tensor for buffer in self.buffers]
        copy_each(*((self.started, tensors) if number == 0 else (tensors, self.started)))

    def take(self, number: int, weight: float) -> None:
        """Keep what this rank's first shard left; on rank 0 it is shard 0."""
        if number == 0:
            copy_each(self.firsts, [buffer.tensor for buffer in self.buffers])

    def reduce(self) -> None:
        """Put rank 0's in place."""
        if self.world.world_size > 1:
            exchanged(dist.broadcast, self.first.view(torch.uint8), src=0)
        copy_each([buffer.tensor for buffer in self.buffers], self.firsts)


def all_gather_single(into: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather a tensor of each rank into one; torch 2.14 gave this its name, and warns of the one before."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    exchanged(gather, into, mine, group=group)


def sum_in_turns(strategy: Group, values: Tensor) -> Tensor:
    """Gather the rows of all ranks and add them: first rows first. A collective."""
    world = strategy.world
    if world.world_size > 1:
        rows = values.new_empty(world.world_size * len(values), *values.shape[1:])
        all_gather_single(rows, values.contiguous())
        values = rows.view(world.world_size, *values.shape).transpose(0, 1).flatten(0, 1)
    strategy.exchanges.synchronize()
    return values.sum(dim=0)
