"""Which parameters a shard of a batch uses: all shards of a step have to use the same ones."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ddp_recipes.errors import RunFailed
from ddp_recipes.strategies.fsdp.order import ask

_PATIENCE_S = 20.0  # with ranks that are at the end of the same step, and may have nothing to ask


class Usage:
    """Notes for which parameters backward gives a gradient, and that they are the same for each shard and rank.

    Ranks send what a block has gradients of, so others would add zeros; and a parameter that no shard uses has to stay
    without a gradient, or an optimizer would decay it.

    Args:
        ordered: as of :class:`~ddp_recipes.strategies.fsdp.order.Order`.
    """

    def __init__(self, ordered: bool) -> None:
        self.ordered = ordered
        self.names: list[str] = []
        self.always: set[str] | None = None  # those that all shards used in the last step, once ranks agreed on it
        self.step: set[str] | None = None  # those that shards with samples use in this one
        self._used: set[str] = set()

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Note a parameter from now on, by the tensor that backward fills; again, it does nothing."""
        if name in self.names:
            return
        self.names.append(name)
        parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]

    def _note(self, name: str, parameter: Tensor) -> None:
        self._used.add(name)

    @contextmanager
    def of_shard(self, counts: bool) -> Iterator[None]:
        """Return the context in which a shard runs; one without samples does not count.

        Raises:
            RunFailed: it used other parameters than the one before.
        """
        self._used = set()
        yield
        if not counts:
            return
        if self.step is None:
            self.step = self._used
        elif other := self.step ^ self._used:
            raise _refused(sorted(other))

    def agree(self, device: torch.device) -> None:
        """See that all ranks used the same. A collective where it is not what it was in the step before.

        Raises:
            RunFailed: they did not; the same on every rank.
        """
        own, self.step = self.step, None
        mine = self._used if own is None else own  # without samples a rank has run the model all the same
        if mine == self.always:
            return
        try:
            asked = [own is not None, *(own is not None and name in own for name in self.names)]
            patience_s = None if self.always is None else _PATIENCE_S
            every = ask([int(each) for each in asked], device, self.ordered, patience_s)
        except RuntimeError as error:
            if self.always is None:
                raise
            raise _refused(sorted(self.always ^ mine)) from error
        ranks, *used = (sum(column) for column in zip(*every, strict=True))
        if others := [name for name, count in zip(self.names, used, strict=True) if count not in (0, ranks)]:
            raise _refused(others)
        self.always = {name for name, count in zip(self.names, used, strict=True) if count}


def _refused(names: Collection[str]) -> RunFailed:
    listed = ", ".join([*names][:4]) + (", …" if len(names) > 4 else "")
    return RunFailed(
        f"Some shards of a batch use {listed} of the model, and others do not. With strategy=fsdp all have to use the "
        f"same parameters. Use them for every sample (e.g. times zero), or choose strategy=ddp_exact."
    )
