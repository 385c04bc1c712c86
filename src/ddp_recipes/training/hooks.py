"""What is added to a run around its steps, and what runs have of it: what is trained, and state in no checkpoint."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from ddp_recipes._compat.torch_ import tree_leaves, writes
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

    def on_fit_end(self, run: Run) -> None:
        """Called after the last step, before the last checkpoint is saved; ``run.reason`` is why it was the last."""


class Trained(RunHooks):
    """Follows which parameters are trained: what ranks exchange is settled when a task is wrapped.

    Between steps, as in a callback, more or fewer may be: then the task is wrapped again. What a forward pass begins to
    train would have a gradient of this rank alone.
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


_OF_TORCH = vars(nn.Module()).keys()
_CONTAINERS, _LONGEST = (tuple, list, dict, deque), 1000
LOOKS = 3  # after as many steps: what changes from each to the next is no cache

log = logging.getLogger(__name__)


class PythonState(RunHooks):
    """Warns of what modules keep in attributes from step to step: counts of passes, a recurrent state.

    Of numbers it is what each of the first steps changes; of tensors, in containers as well, what the next step then
    looks at before it changes it, for many keep what they have computed only to be looked at.

    A run that resumes begins with them anew, and how often a model is called depends on the ranks, shards and
    micro-batches: on one device, in one go, they make no difference that a model's author would see.
    Rank 0 alone has it, which logs.
    """

    def __init__(self) -> None:
        self._seen: list[dict[Key, object]] = []  # after each step
        self._left: set[Key] = set()  # what a step has left as it was
        self._read: list[Callable[[], list[str]]] = []

    def on_step_start(self, run: Run) -> None:
        """See which of the tensors the step looks at."""
        if len(self._seen) == LOOKS:
            self._read = [_spied(*owner, keys) for owner, keys in self._tensors().items()]

    def on_update(self, run: Run) -> None:
        """Look at what there is after each of the first steps, and at nothing any more."""
        if len(self._seen) < LOOKS:
            now, before = dict(_kept(run.task)), self._seen[-1] if self._seen else {}
            self._left |= {key for key, mark in now.items() if mark == before.get(key)}  # while what is marked is there
            self._seen.append(now)
            if len(self._seen) < LOOKS:
                return
            first, *_, last = self._seen
            numbers = [each for each in self._always() if not isinstance(last[each], tuple)]
            _warn([f"{_full(each[0], each[2])} ({first[each]} → {last[each]})" for each in numbers])
            if self._tensors() and not run.trainer.compile:  # whose guards are on the modules' classes
                return
        _warn([name for end in self._read for name in end()])
        run.hooks = [hook for hook in run.hooks if hook is not self]

    def _tensors(self) -> dict[tuple[str, nn.Module], list[str]]:
        """Return by module the attributes with tensors that are changed."""
        found: dict[tuple[str, nn.Module], list[str]] = {}
        for name, module, key in self._always():
            if isinstance(self._seen[-1][name, module, key], tuple):
                found.setdefault((name, module), []).append(key)
        return found

    def _always(self) -> list[Key]:
        """Return what each of the steps has changed; numbers to new ones."""
        return [
            key
            for key, last in self._seen[-1].items()
            if key not in self._left
            if isinstance(last, tuple) or len({each.get(key) for each in self._seen}) == LOOKS
        ]


Key = tuple[str, nn.Module, str]  # a module's name, itself, its attribute


def _kept(task: nn.Module) -> Iterator[tuple[Key, object]]:
    """Yield the numbers in attributes of modules that do not save anything more themselves, and marks of tensors."""
    for name, module in task.named_modules():
        saves = type(module).get_extra_state is not nn.Module.get_extra_state
        saves |= hasattr(module, "on_save_checkpoint")  # which Lightning calls
        if not name.startswith("model") or saves or hasattr(type(module), "metric_state"):  # what a metric counts
            continue
        for key, value in vars(module).items():
            if type(value) in (int, float):
                yield (name, module, key), value
            elif isinstance(value, (Tensor, *_CONTAINERS)) and key not in _OF_TORCH:
                leaves = [] if isinstance(value, _CONTAINERS) and len(value) > _LONGEST else tree_leaves(value)
                tensors = [each for each in leaves if isinstance(each, Tensor)]
                if tensors and not any(isinstance(each, nn.Parameter) for each in tensors):
                    yield (name, module, key), tuple((WeakIdRef(each), writes(each)) for each in tensors)


def _warn(changed: list[str]) -> None:
    if changed:
        log.warning(
            "Steps change what the model keeps in Python attributes: %s%s. No checkpoint has them, so a run that "
            "resumes begins with them anew; and where they count passes, or go from one to the next, other ranks or "
            "shards have others. Keep them in buffers (register_buffer), or have the module save them "
            "(get_extra_state, set_extra_state).",
            ", ".join(changed[:3]),
            f", … ({len(changed)} in all)" if len(changed) > 3 else "",
        )


def _spied(name: str, module: nn.Module, keys: list[str]) -> Callable[[], list[str]]:
    """Take attributes out of a module's dictionary, so that it is asked for each.

    Returns:
        What puts all back as it was, and gives the full names of those that were asked for before they were set.
    """
    kind, held, read = type(module), {key: vars(module).pop(key) for key in keys}, list[str]()

    def asked(self: nn.Module, key: str) -> Any:
        if key not in held:
            return kind.__getattr__(self, key)
        read.append(_full(name, key))
        vars(self)[key] = held.pop(key)
        return vars(self)[key]

    spy: Any = type(kind.__name__, (kind,), {"__getattr__": asked, "__module__": kind.__module__})
    module.__class__ = spy

    def end() -> list[str]:
        module.__class__ = kind
        for key, value in held.items():
            vars(module).setdefault(key, value)
        return read

    return end


def _full(name: str, key: str) -> str:
    return f"{name.removeprefix('model.')}.{key}"
