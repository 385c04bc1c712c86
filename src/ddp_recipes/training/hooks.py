"""What is added to a run around its steps, and what runs have of it: what is trained, and state in no checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from ddp_recipes.errors import RunFailed

if TYPE_CHECKING:
    from ddp_recipes.training.state import Run


class RunHooks:
    """What an extra does around the steps of a run, on every rank; by itself nothing.

    Unlike a callback it is not of the config, is in no checkpoint, and may look at all that the loop works with.
    """

    def on_step_start(self, run: Run) -> None:
        """Called before a step, when nothing of the one before is left to do."""

    def on_update(self, run: Run) -> None:
        """Called once a step counts; logging, validation and saving are still to be done."""

    def on_validated(self, run: Run) -> None:
        """Called after a validation, before a checkpoint is saved."""

    def on_step_end(self, run: Run) -> None:
        """Called when all that follows a step is done."""

    def on_fit_end(self, run: Run, reason: str) -> None:
        """Called after the last step, before the last checkpoint is saved; ``reason`` is why it was the last."""


class Trained(RunHooks):
    """Follows which parameters are trained: what ranks exchange is settled when a task is wrapped.

    Between steps, as in a callback, more or fewer may be: then the task is wrapped again. What a forward pass begins to
    train would have a gradient of this rank alone.

    Args:
        run: whose task is wrapped.
    """

    def __init__(self, run: Run) -> None:
        self._named = [*run.task.named_parameters()]
        self._now = self._trained()

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._named]

    def on_step_start(self, run: Run) -> None:
        """Wrap the task again if others are trained than before; not one that exchanges its gradients itself.

        Raises:
            RunFailed: ranks hold other parts of the model.
        """
        if self._now == (now := self._trained()):
            return
        self._now, settings = now, run.strategy.settings
        if settings.kind != "replicated":
            raise RunFailed(
                f"{type(run.task.model).__name__} or a callback of it freezes other parameters than at the start, and "
                f"with strategy={settings.name} what ranks exchange is settled then. Choose another strategy, or "
                f"model.freeze."
            )
        if run.task.steps is None:
            run.module = run.strategy.wrap(run.task, run.devices)

    def on_update(self, run: Run) -> None:
        """Refuse what was not trained as the step began, and is now.

        Raises:
            RunFailed: names it.
        """
        pairs = zip(self._named, self._now, strict=True)
        begun = [name for (name, parameter), before in pairs if parameter.requires_grad and not before]
        if begun and run.task.steps is None:
            raise RunFailed(
                f"The parameter {begun[0].removeprefix('model.')} was frozen as a step began, and is trained now: a "
                f"forward pass has changed its requires_grad, and of its gradient each rank has only its own part. "
                f"Change it between steps: in a callback's on_epoch_start or on_step."
            )


LOOKS = 3  # after as many steps: what changes from each to the next is no cache

log = logging.getLogger(__name__)


class PythonState(RunHooks):
    """Warns of numbers in attributes of modules that each of the first steps changes, such as counts of passes.

    A run that resumes begins with them anew, and how often a model is called depends on the ranks, shards and
    micro-batches: on one device, in one go, they make no difference that a model's author would see.
    Rank 0 alone has it, which logs.
    """

    def __init__(self) -> None:
        self._seen: list[dict[str, float]] = []  # numbers by name, after each step

    def on_update(self, run: Run) -> None:
        """Look at the numbers after each of the first steps, and at nothing any more."""
        self._seen.append(dict(_numbers(run.task)))
        if len(self._seen) < LOOKS:
            return
        run.hooks = [hook for hook in run.hooks if hook is not self]
        first, *others = self._seen
        always = [name for name in first if len({each.get(name) for each in self._seen}) == LOOKS]
        if not always:
            return
        shown = [f"{name} ({first[name]} → {others[-1][name]})" for name in always[:3]]
        log.warning(
            "Steps change what the model keeps in Python attributes: %s%s. No checkpoint has them, so a run that "
            "resumes begins with them anew; and where they count passes, other ranks or shards count otherwise. Keep "
            "them in buffers (register_buffer), or have the module save them (get_extra_state, set_extra_state).",
            ", ".join(shown),
            f", … ({len(always)} in all)" if len(always) > len(shown) else "",
        )


def _numbers(task: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the numbers in attributes of the model's modules that do not save anything more themselves."""
    for name, module in task.named_modules():
        saves = type(module).get_extra_state is not nn.Module.get_extra_state
        saves |= hasattr(module, "on_save_checkpoint")  # which Lightning calls
        if not name.startswith("model") or saves or hasattr(type(module), "metric_state"):  # what a metric counts
            continue
        inside = f"{name.removeprefix('model.')}." if name != "model" else "model."
        yield from ((inside + key, each) for key, each in vars(module).items() if type(each) in (int, float))
