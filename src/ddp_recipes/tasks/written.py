"""Parameters that something else than an optimizer writes to, such as the moving averages of a teacher.

What a forward pass writes is lost, or happens another number of times, where a strategy gathers parameters for a pass,
or has several passes of a rank make one step: then a run is refused. torch counts what is written to a parameter, but
nothing that goes by ``parameter.data``: one that has got other memory is seen, too, and some passes are looked at by
what they leave. What one rank writes otherwise than the others is found where their parameters are compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import bytes_of, storage_key, writes
from ddp_recipes.errors import RunFailed

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_FIRST, _NEXT = 3, 64  # so many passes are looked at; then this one, and each after four times as many


def sums_of_bits(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor a number that other bits nearly always change: their sum as whole numbers, modulo 2^64.

    One pass through memory, where the tensors are; the process waits for it.
    """
    sums = [bytes_of(each).view(_WORDS[each.element_size()]).sum(dtype=torch.int64) for each in tensors]
    found: dict[int, int] = {}
    for device in {each.device for each in sums}:
        places = [place for place, each in enumerate(sums) if each.device == device]
        found |= zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True)
    return [found[place] for place in range(len(sums))]


def refuse_differing(of_ranks: Sequence[Mapping[str, int]]) -> None:
    """Refuse to go on with parameters that are not the same on all ranks: rank 0's are saved.

    Args:
        of_ranks: by rank the sums of bits of each parameter.

    Raises:
        RunFailed: names the first that differs, and where.
    """
    for name, value in of_ranks[0].items():
        ranks = [rank for rank, sums in enumerate(of_ranks) if sums[name] != value]
        if ranks:
            other = ", ".join(map(str, ranks[:8])) + (", …" if ranks[8:] else "")
            raise RunFailed(
                f"The parameter {name.removeprefix('model.')} has other values on rank {other} than on rank 0, whose "
                f"are saved: something writes to it by what a rank alone has seen. A forward pass does so, with "
                f"nn.Embedding(max_norm=…) or averages over a batch, or a callback that not all ranks run alike. Have "
                f"all ranks write the same once a step (in a callback's on_step, or on_train_batch_end of a Lightning "
                f"module), or make it a buffer (register_buffer), of which all get rank 0's."
            )


class Watch:
    """Sees to it that passes of a module write to none of its parameters.

    Args:
        module: knows the parameters' names.
        parameters: returns those to watch in the pass that begins; all of the module's if left out.
    """

    def __init__(self, module: nn.Module, parameters: Callable[[], Sequence[Tensor]] | None = None) -> None:
        self._module = module
        self._parameters = parameters or (lambda: [*module.parameters()])
        self._passes = 0  # in training
        self._before: list[tuple[Tensor, tuple[int, int]]] = []
        self._sums: tuple[list[Tensor], list[int]] = [], []

    def begin(self) -> None:
        """A pass begins."""
        self._before = [(parameter, seen_of(parameter)) for parameter in self._parameters()]
        if self._module.training:
            if _looked_at(self._passes):
                there = [each for each, _ in self._before if type(each.data) is Tensor and not each.is_meta]  # no fake
                self._sums = there, sums_of_bits(there)
            self._passes += 1

    def end(self) -> None:
        """The pass has ended; of a module that calls itself, the innermost.

        Raises:
            RunFailed: it has written to a parameter, which is named.
        """
        changed = [parameter for parameter, seen in self._before if seen_of(parameter) != seen]
        if (there := self._sums[0]) and not changed:
            now = zip(there, self._sums[1], sums_of_bits(there), strict=True)
            changed = [parameter for parameter, before, after in now if before != after]
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
