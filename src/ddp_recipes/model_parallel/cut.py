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
from torch import Tensor

from ddp_recipes._compat.pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.placement import Conflict, blocks_of, has_state, is_cut, stages_of
from ddp_recipes.tasks import Task

FORMS = 64  # of batches, that blocks of other stages remember

Receive = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Handover:
    """The tensors that the first block of the next stage is called with."""

    block: str
    tensors: Sequence[Tensor]


class _Reached(BaseException):
    """Ends a step at a block; no ``except Exception`` of a model holds it up."""

    def __init__(self, handover: Handover) -> None:
        self.handover = handover


class Cut:
    """A task whose steps can be run one stage at a time.

    Args:
        starts: names of the blocks at which stages begin.
        elsewhere: the device of the tensors that stand for those of other stages.
        remember: whether blocks of earlier stages keep what they gave for each ``form`` of a batch.
    """

    def __init__(self, task: Task, starts: Sequence[str], elsewhere: torch.device, *, remember: bool = True) -> None:
        self.elsewhere = elsewhere
        self.remember = remember
        self._given: dict[Any, list[Any]] = {}
        stages = stages_of(task.model, starts)
        for name, block in blocks_of(task.model, starts).items():
            if (has_state(block) or name in starts) and not is_cut(name, starts):
                block.forward = partial(self._call, name, stages[block], block.forward)

    def run(self, step: Callable[[], Any], stage: int, receive: Receive | None, form: Any = None) -> Any:
        """Run one stage of a step.

        Args:
            step: calls the task with a batch.
            receive: gives the number-th tensor of the stage's :class:`Handover` in place of the one without data.
                ``None``: stop where the stage begins.
            form: equal for batches of the same shapes.

        Returns:
            A :class:`Handover`, or of the last stage what the step returned.

        Raises:
            Conflict: the stages do not follow each other like that.
        """
        self._stage, self._receive, self._latest, self._calls = stage, receive, 0, 0
        if len(self._given) > FORMS:
            self._given.clear()
        self._known = self._given.setdefault((form, stage), []) if self.remember else []
        try:
            output = step()
        except _Reached as reached:
            return reached.handover
        if self._latest < stage:
            raise Conflict("", f"the step ends before a block of stage {stage} is called", (self._latest, stage))
        return output

    def _call(self, name: str, at: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand in for the forward of a block in stage ``at``."""
        if not self._latest <= at <= self._latest + 1:
            message = f"{name}, of stage {at}, is called right after a block of stage {self._latest}"
            raise Conflict(name, message, (at, self._latest))
        enters, self._latest = at > self._latest, at
        if at > self._stage or (enters and at == self._stage and self._receive is None):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if at > self._stage and self._receive is not None:
                self._see(name, tensors, (at - 2, at - 1))
            raise _Reached(Handover(name, tensors))
        if at < self._stage:
            return self._without_data(forward, args, kwargs)
        if enters:
            args, kwargs = self._received(args, kwargs)
        elif at > 0:
            self._see(name, tree_leaves((args, kwargs)), (at - 1, at))
        return forward(*args, **kwargs)

    def _see(self, name: str, values: Sequence[Any], stages: tuple[int, int]) -> None:
        """Refuse what another stage has computed, where this one would need its data."""
        if any(isinstance(value, Tensor) and value.device == self.elsewhere for value in values):
            message = f"{name} is called with a tensor of an earlier stage that the first block of a stage is not given"
            raise Conflict(name, message, stages)

    def _without_data(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number, self._calls = self._calls, self._calls + 1
        if number < len(self._known):
            return self._known[number]
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self.elsewhere), (args, kwargs))
        output = forward(*args, **kwargs)
        if self.remember:
            self._known.append(output)
        return output

    def _received(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self._receive is not None
        values, form = tree_flatten((args, kwargs))
        number = 0
        for at, value in enumerate(values):
            if isinstance(value, Tensor):
                if value.device == self.elsewhere:  # what comes of the inputs alone is there already
                    values[at] = self._receive(number, value)
                number += 1
        args, kwargs = tree_unflatten(values, form)
        return args, kwargs


def parts_of(batch: Any, count: int) -> tuple[list[Any], list[int]]:
    """Cut a batch into micro-batches along the first dimension of its tensors, and return their numbers of samples.

    They differ by one sample at most, the larger ones first; of a small batch some have none.

    Raises:
        RequestError: the tensors of the batch have different numbers of samples, or there are none.
    """
    values, form = tree_flatten(batch)
    tensors = [value for value in values if isinstance(value, Tensor)]
    sizes = {value.shape[:1] for value in tensors}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(str(list(value.shape)) for value in tensors) or "no tensor"
        raise RequestError(
            f"Micro-batches are cut along the first dimension of the tensors of a batch, and the data give "
            f"{shapes}. Allowed: tensors that all have the samples in that dimension, in tuples, lists and dicts."
        )
    columns = [value.tensor_split(count) if isinstance(value, Tensor) else [value] * count for value in values]
    rows = list(zip(*columns, strict=True))
    lengths = [next(len(value) for value in row if isinstance(value, Tensor)) for row in rows]
    return [tree_unflatten(row, form) for row in rows], lengths
