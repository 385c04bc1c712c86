"""Samples fetched one by one, and batches made of them, each with random numbers of its own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from ddp_recipes._compat.pytree import tree_leaves
from ddp_recipes.data.collate import collate
from ddp_recipes.devices import is_accelerator
from ddp_recipes.runtime.seeding import key, restored, rng_states, seed_cpu, seeded


class Draw(NamedTuple):
    """A sample, and what its random numbers are keyed by."""

    sample: int
    epoch: int
    number: int  # the sample's, or its place in the epoch where it can come twice


class Fetched(NamedTuple):
    """A batch, and the names of the samples that its data sets have left out, with others in their place."""

    data: Any
    skipped: tuple[str, ...] = ()


_skipped: dict[str, None] = {}  # by this process, since it was last asked


def skip(name: str) -> None:
    """Note that a sample is left out, for it cannot be read: another one is in its place. For data sets to call."""
    _skipped[name] = None


def _taken() -> tuple[str, ...]:
    found = tuple(_skipped)
    _skipped.clear()
    return found


def may_skip(dataset: Any) -> bool:
    """Whether a data set, or one that it is made of, may leave samples out: it says so by its attribute ``skips``."""
    if isinstance(own := getattr(dataset, "skips", None), bool):
        return own
    parts = [getattr(dataset, "dataset", None)]
    for several in (getattr(dataset, "datasets", None), getattr(dataset, "sources", None)):
        parts += several if isinstance(several, (list, tuple)) else []
    return any(may_skip(part) for part in parts if part is not None)


class KeyedDataset(Dataset[Any]):
    """Draws what a sample's random transforms draw from (seed, epoch, sample): the same in any worker of any rank.

    A ``__getitems__`` of the data set fetches a batch at once as long as it draws nothing: what it gives is then what
    each sample by itself would be. Where it draws, samples are fetched again, each with numbers of its own.

    A ``set_epoch`` of the data set is called with the epoch before each batch, in whichever process fetches it.

    Args:
        collate_fn: makes a batch of samples, with random numbers keyed by (seed, epoch, first sample).
    """

    def __init__(self, dataset: Any, seed: int, name: str, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.seed, self.name, self.collate_fn = dataset, seed, name, collate_fn
        self._at_once = callable(getattr(dataset, "__getitems__", None))
        self._set_epoch = getattr(dataset, "set_epoch", None)

    def __getitems__(self, draws: Sequence[Draw]) -> Fetched:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a data worker: sums on several threads have other bits
        try:
            if callable(self._set_epoch):
                self._set_epoch(draws[0].epoch)
            _skipped.clear()  # of whoever has looked at samples without using them
            batch = self._batch(draws)
            if get_worker_info() is not None:
                refuse_devices(batch, self.name)
            return Fetched(batch, _taken())
        finally:
            torch.set_num_threads(threads)

    def _batch(self, draws: Sequence[Draw]) -> Any:
        samples = self._fetched_at_once(draws) if self._at_once else None
        if samples is None:
            with restored():
                samples = [self._sample(draw) for draw in draws]
        if self.collate_fn is collate:
            return collate(samples)
        with seeded(key(self.seed, draws[0].epoch, draws[0].number, 0)):  # not what the first sample has drawn
            return self.collate_fn(samples)

    def _fetched_at_once(self, draws: Sequence[Draw]) -> list[Any] | None:
        with seeded(key(self.seed, *draws[0][1:])):
            before = rng_states()
            try:
                samples: list[Any] = self.dataset.__getitems__([draw.sample for draw in draws])
            except Exception:  # noqa: BLE001 - one by one it is raised again, and by which sample is known then
                self._at_once = False
                return None
            self._at_once = rng_states() == before
        return samples if self._at_once else None

    def _sample(self, draw: Draw) -> Any:
        """Return a sample. It leaves the generators seeded: the batch puts them back once."""
        seed_cpu(key(self.seed, draw.epoch, draw.number))
        try:
            return self.dataset[draw.sample]
        except Exception as error:
            file = file_of(self.dataset, draw.sample)
            error.add_note(
                f"{type(error).__name__} of sample {draw.sample} of {self.name}, a {type(self.dataset).__name__} "
                f"of {len(self.dataset)}{'' if file is None else f', the file {file}'}: {error}"
            )
            raise


def refuse_devices(batch: Any, name: str) -> None:
    """Refuse what a data worker cannot give to its rank."""
    places = {each.device for each in tree_leaves(batch) if isinstance(each, torch.Tensor)}
    if found := next((place for place in places if is_accelerator(place)), None):
        raise RuntimeError(
            f"{name} gives tensors on {found} in a data worker, and devices are for the rank's own process. Set "
            f"data.num_workers=0, or give tensors on the CPU: each batch is moved to the rank's device."
        )


def file_of(dataset: Any, sample: int) -> str | None:
    """Return the file that a sample is read from, where a data set lists its files as torchvision's and ours do."""
    while isinstance(dataset, Subset):
        dataset, sample = dataset.dataset, dataset.indices[sample]
    for name in ("samples", "files"):
        if isinstance(entries := getattr(dataset, name, None), (list, tuple)) and sample < len(entries):
            entry = entries[sample]
            file = entry[0] if isinstance(entry, (tuple, list)) and entry else entry
            if isinstance(file, (str, Path)):
                return str(Path(file).absolute())
    return None
