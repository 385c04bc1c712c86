"""The order in which ranks exchange blocks: another one on one of them, and parts of different blocks would meet.

With shards, a reduce-scatter adds what ranks send in the order of the shards, to what came of the shards before.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes.errors import RunFailed
from ddp_recipes.strategies.ddp_exact.ordered_sum import all_gather_single
from ddp_recipes.strategies.exchanges import exchanged, wait

_LOOK_S = 1e-3
_PATIENCE_S = 30.0  # with others, once this rank has left the order that all had: they may not have


class Turn(NamedTuple):
    """What a rank does next."""

    does: str
    block: int = -1


_ENDS = Turn("ended the step")
_DOES = ("gathered", "reduced", _ENDS.does)


class Order:
    """What ranks exchange in a pass, or in a step, one after the other; all do it in one order, or none goes on.

    They agree on each turn of the first pass. As long as the next ones go the same way there is nothing to say; a rank
    that leaves it asks the others first, by a kind of collective that is not among the turns: if those have left it,
    too, all agree on each turn again, and else nobody answers.

    Args:
        blocks: their names.
        ordered: whether gradients are exchanged all to all, not reduced by the backend.
    """

    def __init__(self, blocks: Sequence[str], ordered: bool) -> None:
        self.blocks, self.ordered = blocks, ordered
        self.known: dict[bool, list[Turn]] = {}  # of a step, and of a pass of an evaluation
        self.begin(step=False)

    def begin(self, step: bool) -> None:
        """Begin a step, or passes that train nothing."""
        self.step, self.turns, self.follows = step, list[Turn](), step in self.known

    def take(self, turn: Turn, device: torch.device) -> None:
        """Take the next turn.

        Raises:
            RunFailed: others take another one.
        """
        at, known = len(self.turns), self.known.get(self.step, [])
        self.turns.append(turn)
        if self.follows and known[at : at + 1] == [turn]:
            return
        expected = (known[at] if at < len(known) else _ENDS) if self.follows else None
        self.follows = False
        number = _DOES.index(turn.does) + len(_DOES) * (turn.block + 1)
        try:
            every = ask([number], device, self.ordered, None if expected is None else _PATIENCE_S)
        except RuntimeError as error:
            if expected is None:
                raise
            raise self._refused(f"{self._said(turn)}, where all had {self._said(expected)} before") from error
        for rank, (other,) in enumerate(every):
            if other != number:
                block, does = divmod(other, len(_DOES))
                its = Turn(_DOES[does], block - 1)
                raise self._refused(f"{self._said(turn)}, where rank {rank} had {self._said(its)}")

    def end(self, device: torch.device) -> None:
        """End the step, or the pass."""
        if self.turns:
            self.take(_ENDS, device)
            self.known[self.step] = self.turns
        self.begin(self.step)

    def _said(self, turn: Turn) -> str:
        return turn.does if turn == _ENDS else f"{turn.does} {self.blocks[turn.block] or 'the rest of the model'}"

    def _refused(self, what: str) -> RunFailed:
        return RunFailed(
            f"Rank {dist.get_rank()} had {what}. With strategy=fsdp all ranks run the blocks of the model in one "
            f"order, and each as often. Where data or random numbers choose among blocks, choose strategy.wrap so that "
            f"one block has them all, or strategy=ddp_exact."
        )


def ask(values: Sequence[int], device: torch.device, ordered: bool, patience_s: float | None) -> list[list[int]]:
    """Return the values of each rank.

    Args:
        ordered: as of :class:`Order`.
        patience_s: how long to wait for others that may not ask; ``None``: as long as for any collective.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = torch.zeros(ranks, len(values), dtype=torch.int64, device=device)
    work: dist.Work | None
    if ordered:
        every[rank] = torch.tensor(values)
        work = dist.all_reduce(every, async_op=True)
    else:
        work = dist.all_to_all_single(every, torch.tensor([values] * ranks, device=device), async_op=True)
    assert work is not None
    deadline = time.monotonic() + (patience_s or 0.0)
    while patience_s is not None and not work.is_completed():  # NCCL takes no time limit of one wait
        if time.monotonic() > deadline:
            raise RuntimeError(f"Timed out after {patience_s:g} s.")
        time.sleep(_LOOK_S)
    wait(work, every)
    found: list[list[int]] = every.tolist()
    return found


class InTurn:
    """An exchange of a block's parameters or gradients, as ``FSDPModule.set_custom_…`` ask for.

    Their base classes have no public names.
    """

    def __init__(self, order: Order, turn: Turn) -> None:
        self.order, self.turn = order, turn

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(InTurn):
    """Gathers a block's parameters, as FSDP2 does by itself."""

    def __init__(self, order: Order, block: int) -> None:
        super().__init__(order, Turn("gathered", block))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Leave the rows of all ranks in ``output_tensor``."""
        self.order.take(self.turn, input_tensor.device)
        all_gather_single(output_tensor, input_tensor, group=group)


class ReduceScatter(InTurn):
    """Reduces a block's gradients, as FSDP2 does by itself.

    Args:
        replicas: the ranks that have the same part in other replicas, whose gradients are added as well; ``None`` where
            there is one, or FSDP2 adds them.
    """

    def __init__(self, order: Order, block: int, replicas: dist.ProcessGroup | None = None) -> None:
        super().__init__(order, Turn("reduced", block))
        self.replicas = replicas

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Leave this rank's rows of the sum in ``output_tensor``."""
        self.order.take(self.turn, input_tensor.device)
        reduce_scatter_single(output_tensor, input_tensor, group, op)
        if self.replicas is not None:
            exchanged(dist.all_reduce, output_tensor, group=self.replicas, op=op)


def reduce_scatter_single(into: Tensor, all_: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduce a tensor of each rank, and leave each its part; torch 2.14 gave this its name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    exchanged(scatter, into, all_, group=group, op=op)


class OrderedReduceScatter(ReduceScatter):
    """The running total of this rank's part of a block's gradients, over the shards of a step.

    It is called once a shard, for FSDP2 adds what each call leaves. Ranks take turns, so what they send at one time are
    shards that follow each other. -0.0 added to any number leaves it as it is: that is what a shard without a sample
    counts.
    """

    def __init__(self, order: Order, block: int) -> None:
        super().__init__(order, block)
        self.total: Tensor | None = None
        self.counts = True  # whether this rank's shard has a sample

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Send each rank its part of ``input_tensor``; leave the total in ``output_tensor``."""
        self.order.take(self.turn, input_tensor.device)
        if not self.counts:
            input_tensor.fill_(-0.0)
        received = torch.empty_like(input_tensor)
        exchanged(dist.all_to_all_single, received, input_tensor, group=group)
        if self.replicas is not None:
            of_all = received.new_empty(self.replicas.size() * len(received))
            all_gather_single(of_all, received, group=self.replicas)
            received = of_all
        first, *rows = received.view(-1, len(output_tensor))
        if self.total is None:
            output_tensor.copy_(first)
        else:
            torch.add(self.total, first, out=output_tensor)
        for row in rows:
            output_tensor.add_(row)
        self.total = output_tensor
