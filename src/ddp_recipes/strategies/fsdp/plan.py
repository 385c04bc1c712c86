"""What a rank keeps and exchanges, for a dry run: parameters come and go there as ``fully_shard`` has them do."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import Parameter

from ddp_recipes._compat.torch_ import tree_leaves, tree_map_only
from ddp_recipes.devices import is_accelerator
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies.base import Collective, Exchange
from ddp_recipes.strategies.ddp_exact.ordered_sum import OrderedSum
from ddp_recipes.strategies.fsdp.blocks import blocks_of, policies_of, single_numbers
from ddp_recipes.strategies.fsdp.calls import own_steps
from ddp_recipes.strategies.fsdp.settings import FSDPSettings
from ddp_recipes.tasks import Task


class Block:
    """Parameters that are gathered together.

    Args:
        policy: in what they are gathered, and computed with.
        offload: whether a rank's rows are on the CPU.

    Attributes:
        parts: rank 0's rows of each parameter, the most that a rank has.
        part: bytes that a rank gives of its rows, padded to as many on each; ``trained`` those of their gradients.
        buffer: rows of all ranks as they arrive, ``gathers`` times by now; ``whole`` are parameters made of them.
        gradient: the rows that were reduced last.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[Parameter],
        ranks: int,
        policy: MixedPrecisionPolicy,
        offload: bool,
    ) -> None:
        self.module, self.ranks, self.policy, dtype = module, ranks, policy, policy.param_dtype
        self.parts: dict[Parameter, Parameter] = {}
        self.copied = offload or dtype is not None  # before it is sent
        self.part = self.trained = self.gathers = 0
        for each in parameters:
            padded = each.new_empty(-(-len(each) // ranks), *each.shape[1:], device="cpu" if offload else None)
            self.parts[each] = Parameter(padded[: len(each)], each.requires_grad)
            self.trained += padded.nbytes * each.requires_grad
            each.data = each.data.to(dtype) if dtype is not None and each.is_floating_point() else each.data
            self.part += padded.numel() * each.itemsize
        self.buffer: Tensor | None = None
        self.whole: list[Tensor] = []
        self.gradient: Tensor | None = None

    def gather(self) -> None:
        """Receive the rows of all ranks."""
        if not self.whole and self.buffer is None and self.parts:
            self.gathers += 1
            given = self._bytes(self.part if self.copied else 0)
            self.buffer = self._bytes(self.ranks * self.part if self.ranks > 1 else 0)
            del given
            self._copied(self.buffer)

    def take(self) -> Tensor | None:
        """Make parameters of what was received; return that."""
        received, self.buffer = self.buffer, None
        if received is not None:
            self.whole = [torch.empty_like(each) for each in self.parts]
        return received

    def give_back(self) -> None:
        """Free the parameters."""
        self.whole = []

    def reduce(self, ordered: bool, replicas: int) -> Tensor:
        """Reduce gradients to this rank's rows; return what was sent."""
        sent = self._bytes(self.ranks * self.trained)
        for whole in self.parts:
            whole.grad = None
        own = next(each for each in self.parts.values() if each.requires_grad)
        reduced = torch.empty(self.trained // own.itemsize, dtype=own.dtype, device=sent.device)
        if ordered:
            received = [torch.empty_like(sent)]
            if replicas > 1:
                received.append(self._bytes(replicas * len(sent)))
                self._copied(received[-1])
        else:
            self._copied(sent)
        reduced, at = reduced.to(own.device), 0
        for own in self.parts.values():
            if own.requires_grad:
                if own.grad is None:  # else it is added to what there is
                    own.grad = reduced[at : at + own.numel()].view(own.shape)
                    self.gradient = reduced
                at += own.untyped_storage().nbytes() // own.itemsize
        return sent

    def _copied(self, tensor: Tensor) -> None:
        """Gloo gathers and reduces in memory of its own."""
        if tensor.is_cpu and self.ranks > 1:
            torch.empty_like(tensor)

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=next(iter(self.parts)).device)


def in_dtype(dtype: torch.dtype | None, values: Any) -> Any:
    """Return the values with floating-point tensors among them in another dtype."""
    if dtype is None:
        return values
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)


class _At(torch.autograd.Function):
    """Calls something once backward has the gradients of tensors."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Call it; hand on the gradients."""
        ctx.call()
        return None, *gradients


def at_gradients(values: Any, call: Callable[[], None]) -> Any:
    """Return the values unchanged, with a call in backward once it has the gradients of all tensors among them."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return values
    marked = iter(_At.apply(call, *tensors))
    return tree_map_only(Tensor, lambda each: next(marked) if each.requires_grad else each, values)


def exchange_of(settings: FSDPSettings, task: Task, world: World) -> Exchange:
    """Return what rank 0 keeps and sends, and passes that gather and reduce on tensors without data.

    The task's own parameters stand for wholes, which take no memory but while they are gathered.
    """
    model, ranks = task.model, world.world_size // settings.replicas
    offload = settings.offload and any(is_accelerator(each.device) for each in model.parameters())
    blocks, seen = [], set[Parameter]()
    for name, policy in policies_of(model, blocks_of(model, settings.wrap), settings.param_dtype).items():
        module = model.get_submodule(name)  # the last one is the model, which has what is in no block
        own = [each for each in module.parameters() if each.dim() and each not in seen]
        blocks.append(Block(module, own, ranks, policy, offload))
        seen |= {*own}
    count = settings.batch_shards(world).count
    whole = _of_wholes(settings, task, world, count)
    sent = [*_sent(settings, blocks, world, count), *whole.sent]
    return Exchange(
        held=whole.held,
        places=whole.places,
        at_once=False,
        sent=sent,
        parts={whole: own for each in blocks for whole, own in each.parts.items()},
        passes=_Passes(settings, blocks, world, count, sent),
    )


def _of_wholes(settings: FSDPSettings, task: Task, world: World, count: int) -> Exchange:
    """Return what is kept and sent of what each rank has as a whole: buffers, and single numbers."""
    single = single_numbers(task.model)
    if settings.shards is not None:
        return OrderedSum(task, world, count, single).exchange()
    if world.world_size == 1:
        return Exchange()
    every, buffers = range(world.world_size), sum(each.nbytes for each in task.buffers())
    numbers = [Collective("all_reduced", each.nbytes, every) for each in single if each.requires_grad]
    return Exchange(sent=[*numbers, Collective("broadcast", buffers, every)])


def _sent(settings: FSDPSettings, blocks: Sequence[Block], world: World, count: int) -> Iterator[Collective]:
    """Yield what is sent of parameters and gradients, ``count`` shards a step."""
    ranks = blocks[0].ranks
    group, others = range(ranks), range(0, world.world_size, ranks)  # of a replica; with the same rows
    if world.world_size == 1:
        return
    *inner, root = [each.part for each in blocks]
    gathered = root + (2 if settings.level == 3 else 1) * sum(inner)  # again in backward, if a gradient gets there
    once = settings.level == 1
    yield Collective("gathered", gathered * (1 if once else count), group, "step" if once else "batch")
    reduced = sum(each.trained for each in blocks)
    if settings.shards is None:
        yield Collective("reduce_scattered", ranks * reduced, group)
        if settings.replicas > 1:
            yield Collective("all_reduced", reduced, others)
    else:
        yield Collective("scattered", count * ranks * reduced, group)
        yield Collective("scattered", reduced, group, "norm")
        if settings.replicas > 1:
            yield Collective("gathered", count * ranks * reduced, others)


class _Passes:
    """What FSDP2 does in the passes of a step: gather, prefetch, reduce and give back, at hooks of the model.

    Args:
        given: the collectives of a step; what is gathered, the first of them, is what the first pass does gather.
    """

    def __init__(
        self, settings: FSDPSettings, blocks: Sequence[Block], world: World, count: int, given: list[Collective]
    ) -> None:
        self.settings, self.blocks, self.count, self.given = settings, blocks, count, given
        self.root = blocks[-1]
        self.ordered = settings.shards is not None and world.world_size > 1
        self.reduces = self.gives_back = self.in_backward = False
        self.run: list[Block] = []  # blocks of this pass whose forward is done, as often as it was
        self.uses: dict[Block, list[int]] = {}  # where in ``run`` those of a block are whose backward is to come
        self.reduced: set[Block] = set()  # whose backward is done
        self.received: Tensor | None = None  # kept until the next block has received its own
        self.sent: Tensor | None = None  # likewise
        for block in blocks:
            before = cast(Any, partial(self._before_forward, block))
            block.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            block.module.register_forward_hook(partial(self._after_forward, block))
        for name in own_steps(self.root.module):  # which need not call the model itself
            setattr(self.root.module, name, self._as_call(getattr(self.root.module, name)))

    def __call__(self, accumulate: int) -> Sequence[AbstractContextManager[None]]:
        """Return contexts of the passes: two batches of two shards, where there are more."""
        shards, batches = min(self.count, 2), min(accumulate, 2)
        return [
            self._pass(shard, batch, batch == batches - 1, (shard, batch) == (shards - 1, batches - 1))
            for shard in range(shards)
            for batch in range(batches)
        ]

    @contextmanager
    def _pass(self, shard: int, batch: int, last: bool, over: bool) -> Iterator[None]:
        """Run a batch of a shard, which may be its ``last`` one and that of the step."""
        level = self.settings.level
        self.reduces = over if level == 1 and self.settings.shards is None else last
        self.gives_back = level > 1 or over
        if batch == 0 and (self.ordered or shard == 0):
            for block in self.blocks:
                for own in block.parts.values():
                    own.grad = None
                if shard == 0:
                    block.gradient = None
        yield
        for block in (self.root, *self.blocks[:-1]):
            self._reduce(block)  # of blocks whose inputs need no gradient, or that were called several times
        self.run, self.uses, self.reduced, self.in_backward = [], {}, set(), False
        if shard == batch == 0 and self.root.ranks > 1:
            gathered = sum(each.part * each.gathers for each in self.blocks)
            self.given[0] = replace(self.given[0], bytes=gathered * (1 if level == 1 else self.count))
        if over:
            self.sent = None

    def _as_call(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def step(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._before_forward(self.root, self.root.module, args, kwargs)
            return self._after_forward(self.root, self.root.module, args, own(*args, **kwargs))

        return step

    def _before_forward(
        self, block: Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        block.gather()
        args, kwargs = in_dtype(block.policy.param_dtype if block.policy.cast_forward_inputs else None, (args, kwargs))
        if self.in_backward:  # activations are computed again
            block.take()
            return args, kwargs
        if block.buffer is not None:
            self.received = None
            self.received = block.take()
        if block not in self.uses:  # of several calls the first one is the last to be gone back through
            args, kwargs = cast(Any, at_gradients((args, kwargs), partial(self._after_backward, block)))
        return args, kwargs

    def _after_forward(self, block: Block, _: nn.Module, __: Any, output: Any) -> Any:
        output = in_dtype(block.policy.output_dtype, output)
        if self.in_backward:
            return output
        self.uses.setdefault(block, []).append(len(self.run))
        self.run.append(block)
        if self.settings.level == 3 and block is not self.root:
            block.give_back()
        if block is self.root:
            self.received = None
            if not torch.is_grad_enabled():
                self.run, self.uses = [], {}
                for each in self.blocks:
                    each.give_back()
        return at_gradients(output, partial(self._before_backward, block))

    def _before_backward(self, block: Block) -> None:
        self.in_backward = True
        block.gather()
        block.take()
        if (at := self.uses[block].pop()) > 0:
            self.run[at - 1].gather()

    def _after_backward(self, block: Block) -> None:
        if self.run.count(block) == 1:
            self._reduce(block)
        elif self.gives_back:
            block.give_back()

    def _reduce(self, block: Block) -> None:
        if block in self.reduced:
            return
        self.reduced.add(block)
        if self.gives_back:
            block.give_back()
        if self.reduces:
            self.sent = None
            if block.trained:
                self.sent = block.reduce(self.ordered, self.settings.replicas)
