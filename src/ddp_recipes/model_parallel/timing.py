"""How long the modules of a model take on a device: each operation of a step on its own."""

import copy
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes import devices
from ddp_recipes._compat.dispatch import OpOverload
from ddp_recipes._compat.model_parallel import current_node, next_sequence_number, sequence_number
from ddp_recipes._compat.torch_ import tree_map_only
from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.dry_run import OUTSIDE, DryRun, ModuleMode
from ddp_recipes.tasks.fake import computed

STEPS = 3  # that count, after one that does not


def timed(dry_run: DryRun, device: torch.device, forward: Callable[[], AbstractContextManager[Any]]) -> dict[str, int]:
    """Return the nanoseconds that a step spends in each module itself, forward and in training backward.

    The median over a few steps of a copy of the task, which leave weights, buffers and random generators alone. Each
    forward pass runs in the context ``forward``.
    """
    steps = []
    try:
        with devices.random_kept([device]):
            found = (each for module in dry_run.task.modules() for each in computed(module).values())
            memo = {id(each): each.detach() for each in found}
            task = copy.deepcopy(dry_run.task, memo).to(device)
            batch = tree_map_only(Tensor, lambda each: each.to(device, copy=True), dry_run.batch)
            stopwatch = _Stopwatch(task.model, device)
            for _ in range(1 + STEPS):
                stopwatch.time = Counter()
                with stopwatch, torch.set_grad_enabled(dry_run.step == "training_step"):
                    with forward():
                        output = getattr(task, dry_run.step)(batch)
                    if dry_run.step == "training_step":
                        output.loss.backward()
                task.zero_grad()
                steps.append(stopwatch.time)
    except torch.OutOfMemoryError as error:
        raise RequestError(
            f"model.split=timed runs all of the model on {device}, where it does not fit "
            f"({str(error).splitlines()[0]}). Use model.split=auto, or give names."
        ) from None
    return {name: round(statistics.median(step[name] for step in steps[1:])) for name in steps[-1] if name != OUTSIDE}


class _Stopwatch(ModuleMode):  # type: ignore[no-untyped-call]
    """Times every operation, for the module whose forward it is in, or is the backward of.

    Autograd numbers its nodes as they come, so the numbers given out in a module's forward are that module's.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.time: Counter[str] = Counter()
        self.device = device
        self.numbers, self.names = [0], [OUTSIDE]  # of the first node since another module runs, and which one that is
        self.follow(model)

    def changed(self) -> None:
        self.numbers.append(next_sequence_number())
        self.names.append(self.active[-1])

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        node = current_node()
        begin = self._now()
        output = func(*args, **(kwargs or {}))
        took = self._now() - begin
        # What adds up gradients has a number beyond all others, and is nobody's.
        module = self.active[-1] if node is None else self.names[bisect_right(self.numbers, sequence_number(node)) - 1]
        self.time[module] += took
        return output

    def _now(self) -> int:
        devices.synchronize(self.device)
        return time.perf_counter_ns()
