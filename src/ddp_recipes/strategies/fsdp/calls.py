"""What FSDP2 would change of a block's calls: which inputs are one tensor, and outputs in memory that it frees.

And steps that a model brings itself, as those written for Lightning do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from ddp_recipes._compat.fsdp import in_backward, is_wrapped, note_call, reduce_now, replaced
from ddp_recipes._compat.torch_ import storage_key, tree_flatten, tree_leaves, tree_map_only, tree_unflatten, viewed
from ddp_recipes.errors import RunFailed
from ddp_recipes.tasks.written import Watch


class _Leaf:
    """Stands for a tensor that is among the inputs already, as the leaf of that number."""

    def __init__(self, number: int) -> None:
        self.number = number


class Calls:
    """The calls of blocks in a pass.

    FSDP2 reduces after each use of a block in backward, although autograd adds the gradients of all uses up first. So
    one that is called several times in a pass is reduced once, at its end.
    """

    def __init__(self) -> None:
        self.called: set[FSDPModule] = set()
        self.repeated: set[FSDPModule] = set()
        self.in_step = False
        self.watches: dict[nn.Module, Watch] = {}

    def watch(self, block: nn.Module, deal: Callable[[], FSDPModule]) -> FSDPModule:
        """Deal a block, with hooks next to those of FSDP2, on both sides of them."""
        block.register_forward_pre_hook(_together, prepend=True, with_kwargs=True)
        self.watches[block] = watch_of_gathered(block)
        block.register_forward_pre_hook(self._note)
        block.register_forward_hook(self._apart, with_kwargs=True)
        dealt = deal()
        block.register_forward_pre_hook(_once, prepend=True, with_kwargs=True)
        block.register_forward_pre_hook(self._count, prepend=True)
        return dealt

    def _count(self, block: Any, _: Any) -> None:
        if other := next(replaced(block), None):
            raise RunFailed(
                f"{type(block).__name__} is called with another {other} in the place of its parameter, by "
                f"torch.func.functional_call or a new nn.Parameter, and with strategy=fsdp it would be computed with "
                f"its own, which is gathered. Write to parameters in place, or choose strategy=ddp or ddp_exact."
            )
        if not torch.is_grad_enabled() or in_backward():  # activations are computed again
            return
        note_call(block, block in self.called)
        if block in self.called:
            self.repeated.add(block)
        self.called.add(block)

    def _note(self, block: nn.Module, _: Any) -> None:
        self.watches[block].begin()

    def _apart(self, block: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        self.watches[block].end()
        return apart(block, outputs, tree_leaves((args, kwargs)))

    @contextmanager
    def step(self, blocks: Sequence[FSDPModule]) -> Iterator[None]:
        """Return the context of a step's forward and backward."""
        self.called, self.repeated, self.in_step = set(), set(), True
        try:
            yield
        finally:  # also where a rank is lost meanwhile, and replaced
            set_backward(blocks, reduces=False, over=False, gives_back=False)
            self.in_step = False

    @contextmanager
    def backward(self, blocks: Sequence[FSDPModule], reduces: bool, over: bool, gives_back: bool) -> Iterator[None]:
        """Return the context of a step's own backward pass.

        Args:
            reduces: gradients; those of blocks that were called several times at its end.
            over: whether it is the step's last one.
            gives_back: what is gathered of a block, once it is through with it.
        """
        repeated = [block for block in blocks if block in self.repeated]
        set_backward(blocks, reduces, over, gives_back)
        set_backward(repeated, False, over, gives_back)
        yield
        if reduces:
            set_backward(repeated, reduces, over, gives_back)
            reduce_now(repeated)


def set_backward(blocks: Sequence[FSDPModule], reduces: bool, over: bool, gives_back: bool) -> None:
    """Say what backward passes do from now on.

    Those of the user's within a forward pass (``torch.autograd.grad``) do none of this: what goes on may need what is
    gathered, as a gradient of gradients does.
    """
    for block in blocks:
        block.set_requires_gradient_sync(reduces, recurse=False)
        block.set_reshard_after_backward(gives_back, recurse=False)
        block.set_is_last_backward(over)


def watch_of_gathered(block: nn.Module) -> Watch:
    """Watch what is gathered of a block: writes to it would not last."""
    return Watch(block, partial(_whole, block))


def _whole(block: nn.Module) -> list[nn.Parameter]:
    return [each for each in block.parameters() if not hasattr(each, "to_local")]


def _once(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave one of inputs that are the same tensor, for FSDP2 makes another one of each."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    if len({*tensors}) == len(tensors):
        return None
    first = {id(leaf): number for number, leaf in reversed([*enumerate(leaves)])}
    kept = [
        _Leaf(first[id(leaf)]) if isinstance(leaf, Tensor) and first[id(leaf)] != number else leaf
        for number, leaf in enumerate(leaves)
    ]
    return tree_unflatten(kept, spec)


def _together(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put what FSDP2 made of an input in all its places: attention asks whether its query is its key."""
    leaves, spec = tree_flatten((args, kwargs))
    if not any(isinstance(leaf, _Leaf) for leaf in leaves):
        return None
    return tree_unflatten([leaves[leaf.number] if isinstance(leaf, _Leaf) else leaf for leaf in leaves], spec)


def apart(block: nn.Module, outputs: Any, inputs: Sequence[Any] = ()) -> Any:
    """Return outputs in memory of their own.

    That of a block's parameters is freed when they are given back. Of a view FSDP2 notices no gradient any more once it
    is changed in place, and of an input that is returned only when the block's backward pass is over.
    """
    places = {storage_key(each) for each in _whole(block)}
    given = {id(each) for each in inputs}

    def shares(leaf: Any) -> bool:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or hasattr(leaf, "to_local"):
            return False
        if is_wrapped(leaf):
            return False
        missed = leaf.requires_grad and (id(leaf) in given or viewed(leaf) is not None)
        return missed or storage_key(leaf) in places

    if not any(map(shares, tree_leaves(outputs))):
        return outputs
    return tree_map_only(Tensor, lambda leaf: leaf.clone() if shares(leaf) else leaf, outputs)


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def own_steps(model: nn.Module) -> list[str]:
    """Return the names of the steps that a model has."""
    return [name for name in _STEPS if hasattr(model, name)]


def gather_in_steps(model: nn.Module, begin: Callable[[], None], done: Callable[[], None]) -> None:
    """Have what is in no block gathered for a step as for a call: a step need not call the model itself.

    Args:
        begin: called before each step.
        done: called after each.
    """
    for name in own_steps(model):
        own = getattr(model, name)
        setattr(model, name, _watched(model, own))
        register_fsdp_forward_method(model, name)
        setattr(model, name, _between(model, own, getattr(model, name), begin, done))


def _watched(model: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    watch = watch_of_gathered(model)

    @wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        with watch.one():
            return own(*args, **kwargs)

    return step


def _between(
    model: nn.Module, own: Any, gathered: Callable[..., Any], begin: Callable[[], None], done: Callable[[], None]
) -> Callable[..., Any]:
    @wraps(own)  # for who asks what it takes
    def step(*args: Any, **kwargs: Any) -> Any:
        begin()
        output = apart(model, gathered(*args, **kwargs))
        done()
        return output

    return step
