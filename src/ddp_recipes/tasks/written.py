"""Parameters that a forward pass writes to, such as the moving averages of a teacher.

That is lost, or happens another number of times, where a strategy gathers parameters for a pass, or has several passes
of a rank make one step: then a run is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ddp_recipes._compat.tensors import writes
from ddp_recipes.errors import RunFailed

Writes = Sequence[tuple[Tensor, int]]


def noted(parameters: Sequence[Tensor]) -> Writes:
    """Return how often each parameter has been written to by now."""
    return [(parameter, writes(parameter)) for parameter in parameters]


def refuse_written(before: Writes, module: nn.Module) -> None:
    """Refuse a model whose parameters a pass has written to.

    Args:
        before: the writes before the pass.
        module: has the parameters; knows their names.

    Raises:
        RunFailed: names the first of them.
    """
    changed = [parameter for parameter, count in before if writes(parameter) != count]
    if not changed:
        return
    names = [name for name, each in module.named_parameters() if any(each is one for one in changed)]
    name = names[0].removeprefix("model.") if names else "a parameter"
    raise RunFailed(
        f"A forward pass writes to the parameter {name}. Here a step is made of several passes, or a pass has copies "
        f"of parameters, so that would be lost or done several times. Change parameters once a step: in a callback's "
        f"on_step, or in on_train_batch_end of a Lightning module (callbacks=ema keeps moving averages). Or make it a "
        f"buffer (register_buffer), or train without shards, stages and micro-batches."
    )


@contextmanager
def refusing_writes(module: nn.Module) -> Iterator[None]:
    """Refuse what passes in this context write to a module's parameters.

    Raises:
        RunFailed: names the first of them.
    """
    before = noted([*module.parameters()])
    yield
    refuse_written(before, module)
