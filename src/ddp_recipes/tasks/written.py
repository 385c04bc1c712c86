"""Parameters and buffers that something else than an optimizer or a training step writes to, as a teacher's averages.

What a forward pass writes to a parameter is lost, or happens another number of times, where a strategy gathers
parameters for a pass, or has several passes of a rank make one step: then a run is refused. torch counts what is
written to a parameter, but nothing that goes by ``parameter.data``: one that has got other memory is seen, too, and
some passes are looked at by what they leave. What one rank writes otherwise than the others is found where their
parameters are compared.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn, strided

from ddp_recipes._compat.torch_ import local, storage_key, writes
from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.tensors import sums_of_bits
from ddp_recipes.tasks.blocks import on_copies

_FIRST, _NEXT = 3, 64  # so many passes are looked at; then this one, and each after four times as many


class Watch:
    """Sees to it that passes of a module write to none of its parameters.

    Args:
        module: knows the parameters' names.
        parameters: returns those to watch in the pass that begins; all of the module's if left out.
    """

    def __init__(self, module: nn.Module, parameters: Callable[[], Sequence[Tensor]] | None = None) -> None:
        self._module = module
        self._parameters = parameters or (lambda: [*module.parameters()])
        self._passes = {True: 0, False: 0}  # in training, and in evaluations
        self._before: list[tuple[Tensor, tuple[int, int]]] = []
        self._sums: tuple[list[Tensor], list[int]] = [], []

    def begin(self) -> None:
        """A pass begins."""
        self._before = [(parameter, seen_of(parameter)) for parameter in self._parameters()]
        self._sums = [], []  # of one that did not end, as where a checkpoint has computed what it needs
        if _looked_at(self._passes[self._module.training]):
            watched = [each for each, _ in self._before if not each.is_meta]
            here = [each for each in watched if type(local(each).data) is Tensor]  # no fake
            self._sums = here, sums_of_bits([*map(local, here)])
        self._passes[self._module.training] += 1

    def end(self) -> None:
        """The pass has ended; of a module that calls itself, the innermost.

        Raises:
            RunFailed: it has written to a parameter, which is named.
        """
        changed = [parameter for parameter, seen in self._before if seen_of(parameter) != seen]
        if not changed:  # what has been given back meanwhile has no memory
            here = [pair for pair in zip(*self._sums, strict=True) if local(pair[0]).untyped_storage().size()]
            now = zip(here, sums_of_bits([local(parameter) for parameter, _ in here]), strict=True)
            changed = [parameter for (parameter, before), after in now if before != after]
        self._before, self._sums = [], ([], [])
        if changed:
            names = [name for name, each in self._module.named_parameters() if any(each is one for one in changed)]
            raise _refusal(names[0].removeprefix("model.") if names else "a parameter")

    @contextmanager
    def one(self) -> Iterator[None]:
        """Make the context of a pass."""
        self.begin()
        yield
        self.end()


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[set[str]]:
    """Leave buffers as they are, whatever moves them meanwhile; the set gets the names of those that moved."""
    before, moved = dict(module.named_buffers()), set[str]()
    with on_copies(module):
        yield moved
        after = dict(module.named_buffers())
        moved.update(name for name, buffer in before.items() if not _alike(buffer, after.get(name)))


def _alike(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape:
        return False
    return one.layout != strided or len({*sums_of_bits([one, other])}) == 1


def seen_of(parameter: Tensor) -> tuple[int, int]:
    """Return what changes as a parameter is written to, or gets other memory: all but what goes by its ``data``."""
    return writes(parameter), storage_key(parameter)


def _looked_at(number: int) -> bool:
    """Whether a pass is looked at by what it leaves: the first ones, then ever fewer, for each takes a little time."""
    return number < _FIRST or (number >= _NEXT and number.bit_count() == 1 and number.bit_length() % 2 == 1)


def _refusal(name: str) -> RunFailed:
    return RunFailed(
        f"A forward pass writes to the parameter {name}. Here a step is made of several passes, or a pass has copies "
        f"of parameters, so that would be lost or done several times. Change parameters once a step: in a callback's "
        f"on_step, or in on_train_batch_end of a Lightning module (callbacks=ema keeps moving averages). Or make it a "
        f"buffer (register_buffer), or train without shards, stages and micro-batches."
    )
