"""Blocks that run in another way: computed again in backward, or compiled. Names in the state dict stay the same."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_recipes._compat.torch_ import allow_recompiles, compile_nothing_of, graphs_compiled
from ddp_recipes.config.parallelism import StrategySettings
from ddp_recipes.config.settings import TrainerSettings
from ddp_recipes.errors import RequestError
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.blocks import chosen, on_copies
from ddp_recipes.training.hooks import RunHooks
from ddp_recipes.training.state import Run

_MANY = 8  # steps; else the first ones have something to compile, and those of an epoch's last batch

log = logging.getLogger(__name__)


def recompute(model: nn.Module, wish: bool | str | Sequence[str], compiled: bool) -> None:
    """Have blocks keep what they are called with alone (Chen et al., "Training Deep Nets with Sublinear Memory", 2016).

    Weights are the same bits: random numbers are drawn again, and buffers move once.

    Args:
        wish: true for the elements of every list of blocks, or patterns of modules' names.

    Raises:
        RequestError: there is no such block, or it has buffers and is to be compiled.
    """
    for name in chosen(model, wish, "model.activation_checkpointing"):
        block = model.get_submodule(name)
        if compiled and (buffers := [own for own, _ in block.named_buffers()]):
            raise RequestError(
                f"model.activation_checkpointing and trainer.compile do not go together here: {name} has buffers "
                f"({', '.join(buffers[:3])}), which would move in each of its two passes. Leave out one, or name "
                f"blocks without buffers."
            )
        kind: Any = type(block)
        block.__class__ = _recomputed(kind)


@cache
def _recomputed(base: Any) -> Any:
    """Return the class with another ``forward``: unlike one of an instance it is copied with the module."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or (torch.compiler.is_compiling() and _of_one_row(args)):
            return base.forward(self, *args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False}
        if next(self.buffers(), None) is not None:  # torch.compile takes no contexts
            options["context_fn"] = partial(_contexts, self)
        # Keywords as an argument: torch draws random numbers again on the devices of arguments alone.
        return checkpoint(partial(_called, partial(base.forward, self)), kwargs, *args, **options)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _of_one_row(args: Sequence[Any]) -> bool:
    """Whether a block gets a single row, as of a last batch of one sample: torch fails to compile it computed again.

    It says "Node ... was invalid, but is output", and what it would keep is little.
    """
    first = next((each for each in args if isinstance(each, Tensor) and each.is_floating_point()), None)
    return first is not None and first.dim() > 1 and first.numel() == first.shape[-1]


def _called(forward: Any, named: Mapping[str, Any], *args: Any) -> Any:
    return forward(*args, **named)


def compile_model(task: Task, trainer: TrainerSettings, strategy: StrategySettings) -> None:
    """Have calls of the model compiled, or the forward passes of its blocks: of blocks that are alike once.

    Where ``trainer.compile_dynamic`` leaves it open, and the bits may not depend on which shards a rank has computed
    before, each size of batches is compiled by itself.

    Raises:
        RequestError: there is no such block.
    """
    # Their functions run in hooks of the model.
    compile_nothing_of(
        "ddp_recipes._compat", "ddp_recipes.runtime", "ddp_recipes.strategies", "ddp_recipes.tasks.written"
    )
    mode = trainer.compile if isinstance(trainer.compile, str) else None
    exact = strategy.fixed_shards is not None
    dynamic = False if exact and trainer.compile_dynamic is None else trainer.compile_dynamic
    blocks = chosen(task.model, trainer.compile_blocks, "trainer.compile_blocks") if trainer.compile_blocks else []
    by_hooks = [*task.model.modules()] if strategy.kind == "sharded" else []  # where its hooks cut a model's graph
    allow_recompiles(None if dynamic is False else len(blocks or by_hooks or task.called))
    for each in [] if blocks else task.called:
        each.compile(mode=mode, dynamic=dynamic)
    for name in blocks:
        block = task.model.get_submodule(name)
        kind: Any = type(block)
        block.__class__ = _compiled(kind, mode, dynamic)


@cache
def _compiled(base: Any, mode: str | None, dynamic: bool | None) -> Any:
    """Return the class with a compiled ``forward``; the hooks around it, as of FSDP2, would break its graph."""
    forward = torch.compile(base.forward, mode=mode, dynamic=dynamic)
    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


class Compiles(RunHooks):
    """Warns where the first step has nothing compiled, or where one step after the other has something."""

    _before, _compiling = 0, 0

    def on_step_start(self, run: Run) -> None:
        """Count graphs."""
        self._before = graphs_compiled()

    def on_update(self, run: Run) -> None:
        """Count those of the step."""
        if graphs_compiled() > self._before:
            self._compiling += 1
            if self._compiling == _MANY:
                self._warn(
                    run,
                    f"has compiled something in {_MANY} steps so far, mostly for other sizes of batches. Set "
                    f"trainer.compile_dynamic=true for all at once; TORCH_LOGS=recompiles (environment) shows reasons",
                )
        elif not self._compiling and _has_samples(run):
            parts = ",".join(name for name, _ in run.task.model.named_children())
            self._warn(
                run,
                f"has compiled nothing in the first step: it does not call {type(run.task.model).__name__} itself, or "
                f"torch's compiler is turned off. Name the parts that it calls: trainer.compile_blocks=[{parts}]",
            )

    def _warn(self, run: Run, text: str) -> None:
        log.warning("trainer.compile=%s %s.", str(run.trainer.compile).lower(), text)
        run.hooks = [hook for hook in run.hooks if hook is not self]


def _has_samples(run: Run) -> bool:
    """Whether this rank had a sample in the step that was taken; a server of parameters has none."""
    assert run.unfinished is not None
    return any(run.train.plan.size(run.unfinished.batch, shard) for shard in run.train.shards)


def _contexts(block: nn.Module) -> tuple[Any, Any]:
    return nullcontext(), on_copies(block)
