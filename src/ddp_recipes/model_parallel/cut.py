"""One stage of a step, for a process that holds no other.

Every process runs the whole step, in the model's own code, but computes in its stage only. Blocks of earlier stages
give tensors without data, in the right shapes. The first block of the stage is called with them; there, what the stage
before has sent takes their place. The first block of a later stage ends the step: what it would have been called with
is what is to be sent. So a model needs no form of its own, only blocks that are called one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes._compat.model_parallel import current_checkpoint, current_node, has_backward_hooks
from ddp_recipes._compat.torch_ import buffers_of, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from ddp_recipes.model_parallel.placement import Conflict, blocks_of, has_constants, has_state, is_cut, stages_of
from ddp_recipes.tasks import Task

SAME_WAY = "each batch has to take the same way through the blocks before a stage"
WITHIN_CHECKPOINT = (
    "would begin a stage in the middle of a torch.utils.checkpoint, which runs the blocks before it again as well"
)
NO_GRADIENT = (
    "begins a stage and is called without gradients where its input has one (torch.no_grad, or torch.utils.checkpoint "
    "with use_reentrant=True; with use_reentrant=False it can be)"
)
BACKWARD_HOOK = (
    "has a hook of register_full_backward_hook, and a stage begins there or in it: no process has the gradients of its "
    "inputs and of its outputs"
)

Receive = Callable[[int, Tensor], Tensor]
Given = list[tuple[str, Any]]  # what blocks of earlier stages were called, one after the other, and gave


@dataclass(frozen=True)
class Crossing:
    """What crosses a cut: the tensors that the first block of the next stage is called with, and its name."""

    tensors: Sequence[Tensor]
    block: str


class _Reached(BaseException):
    """Ends a step at a block; no ``except Exception`` of a model stops it."""

    def __init__(self, crossing: Crossing) -> None:
        self.crossing = crossing


class Cut:
    """A task whose steps can be run one stage at a time; ``elsewhere`` is the device of other stages' tensors."""

    def __init__(self, task: Task, starts: Sequence[str], elsewhere: torch.device) -> None:
        self.elsewhere = elsewhere
        self.hooked = [name for name, each in task.model.named_modules() if name and has_backward_hooks(each)]
        stages = stages_of(task.model, starts)
        for name, block in blocks_of(task.model, starts).items():
            if is_cut(name, starts) or not (has_state(block) or name in starts):
                continue
            if has_constants(block) and name not in starts:
                block.forward = partial(self._with_constants, block, block.forward)
            else:
                block.forward = partial(self._call, name, stages[block], block.forward)

    def run(self, step: Callable[[], Any], stage: int, receive: Receive | None, given: Given | None = None) -> Any:
        """Run one stage of a step.

        Args:
            step: calls the task with a batch.
            receive: gives the number-th tensor of the stage's :class:`Crossing` in place of the one without data.
                ``None``: stop where the stage begins.
            given: what blocks of earlier stages give for batches of these shapes; what is missing is appended.

        Returns:
            A :class:`Crossing`, or of the last stage what the step returned.

        Raises:
            Conflict: a stage needs more than what its first block is called with, or the step takes another way
                through the blocks of earlier stages than before.
        """
        self._stage, self._receive, self._latest, self.entered = stage, receive, 0, ""
        self._within: Any = None  # the checkpoint that the last block was called in
        self._given, self._calls = [] if given is None else given, 0
        self._received_now: list[tuple[Tensor, Tensor]] = []  # without data, and what came in its place
        try:
            output = step()
        except _Reached as reached:
            return reached.crossing
        finally:
            self._received_now = []
        if self._latest < stage:
            raise Conflict("", f"the step ends before a block of stage {stage} is called", (self._latest, stage))
        return output

    def _call(self, name: str, at: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for the forward of a block in stage ``at``."""
        if current_node() is not None:  # a checkpoint runs it once more, for the backward pass
            return forward(*self._again(args), **self._again(kwargs))
        if not self._latest <= at <= self._latest + 1:
            message = f"{name}, of stage {at}, is called right after a block of stage {self._latest}"
            raise Conflict(name, message, (at, self._latest))
        within = current_checkpoint()
        if at > self._latest and within is not None and within is self._within:
            raise Conflict(name, f"{name} {WITHIN_CHECKPOINT}", (self._latest, at))
        self._within = within
        enters, self._latest = at > self._latest, at
        for around in self.hooked if enters else ():
            if f"{name}.".startswith(f"{around}."):
                raise Conflict(name, f"{around} {BACKWARD_HOOK}", (at - 1, at))
        if at > self._stage or (enters and at == self._stage and self._receive is None):
            tensors = [self._came(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if at > self._stage and self._receive is not None:
                self._refuse_elsewhere(name, tensors, (at - 2, at - 1))
            raise _Reached(Crossing(tensors, name))
        if at < self._stage:
            return self._without_data(name, forward, args, kwargs)
        if enters:
            self.entered = name
            args, kwargs = self._received(args, kwargs)
        elif at > 0 and self._is_elsewhere((args, kwargs)):  # what the first block of the stage was called with, too
            args, kwargs = tree_map_only(Tensor, self._came, (args, kwargs))
            self._refuse_elsewhere(name, tree_leaves((args, kwargs)), (at - 1, at))
        return forward(*args, **kwargs)

    def _with_constants(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for the forward of a block that each process has: it runs where its inputs are."""
        if not self._is_elsewhere((args, kwargs)):
            return forward(*args, **kwargs)
        kept = [(own, dict(own)) for module in block.modules() if (own := buffers_of(module))]
        try:
            for own, before in kept:
                own.update({name: each if each is None else each.to(self.elsewhere) for name, each in before.items()})
            return forward(*args, **kwargs)
        finally:
            for own, before in kept:
                own.update(before)

    def _is_elsewhere(self, values: Any) -> bool:
        return any(isinstance(value, Tensor) and value.device == self.elsewhere for value in tree_leaves(values))

    def _came(self, tensor: Tensor) -> Tensor:
        """Return what came in the place of a tensor in this pass, or the tensor itself.

        Its ``received`` does not tell: a model may keep a tensor from an earlier pass, and with it what came then.
        """
        return next((came for without, came in self._received_now if without is tensor), tensor)

    def _refuse_elsewhere(self, name: str, values: Sequence[Any], stages: tuple[int, int]) -> None:
        """Refuse a tensor of another stage where this one would need its data."""
        if self._is_elsewhere(values):
            message = f"{name} is called with a tensor of an earlier stage that the first block of a stage is not given"
            raise Conflict(name, message, stages)

    def _without_data(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number, self._calls = self._calls, self._calls + 1
        if number == len(self._given):
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self.elsewhere), (args, kwargs))
            self._given.append((name, forward(*args, **kwargs)))
        before, output = self._given[number]
        if before != name:
            raise Conflict(name, f"{name} is called where {before} was called before: {SAME_WAY}", (0, self._stage))
        # Other tensors each time, as what comes in the place of one is kept with it.
        return tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), output)

    def _received(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self._receive is not None
        values, form = tree_flatten((args, kwargs))
        number = 0
        for at, value in enumerate(values):
            if isinstance(value, Tensor):
                if value.device == self.elsewhere:  # what follows from the inputs alone is computed here
                    if value.requires_grad and not torch.is_grad_enabled():
                        raise Conflict(self.entered, f"{self.entered} {NO_GRADIENT}", (self._stage - 1, self._stage))
                    values[at] = self._receive(number, value)
                    value.received = values[at]  # type: ignore[attr-defined]
                    self._received_now.append((value, values[at]))
                number += 1
        args, kwargs = tree_unflatten(values, form)
        return args, kwargs

    def _again(self, values: Any) -> Any:
        """Return arguments with what had come in the place of those without data."""
        return tree_map_only(Tensor, lambda tensor: getattr(tensor, "received", tensor), values)
