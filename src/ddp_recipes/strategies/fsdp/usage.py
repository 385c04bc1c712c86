"""Which parameters a shard of a batch uses: all shards of a run have to use the same ones."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_recipes.errors import RunFailed


class Usage:
    """Notes for which parameters backward gives a gradient, and that they are the same for each shard and rank.

    Ranks send what a block has gradients of, so others would add zeros; and a parameter that no shard uses has to stay
    without a gradient, or an optimizer would decay it.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.always: set[str] | None = None  # those that shards use, once there was one
        self.agreed = False  # whether ranks have seen that they use the same
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
    def of_shard(self) -> Iterator[None]:
        """Return the context in which a shard with samples runs.

        Raises:
            RunFailed: it used other parameters than the one before.
        """
        self._used = set()
        yield
        if self.always is None:
            self.always = self._used
        elif other := self.always ^ self._used:
            raise _refused(sorted(other))

    def agree(self, device: torch.device) -> None:
        """See, once, that all ranks used the same. A collective.

        Raises:
            RunFailed: they did not; the same on every rank.
        """
        if self.agreed:
            return
        self.agreed = True
        own = [0] * (len(self.names) + 1)
        if self.always is not None:
            own = [1, *(name in self.always for name in self.names)]
        counts = torch.tensor(own, dtype=torch.int64, device=device)
        dist.all_reduce(counts)
        ranks, *used = counts.tolist()
        if others := [name for name, count in zip(self.names, used, strict=True) if count not in (0, ranks)]:
            raise _refused(others)
        self.always = {name for name, count in zip(self.names, used, strict=True) if count}


def _refused(names: Collection[str]) -> RunFailed:
    listed = ", ".join([*names][:4]) + (", …" if len(names) > 4 else "")
    return RunFailed(
        f"Some shards of a batch use {listed} of the model, and others do not. With strategy=fsdp all have to use the "
        f"same parameters. Use them for every sample (e.g. times zero), or choose strategy=ddp_exact."
    )
