"""Samples fetched one by one, each with random numbers of its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from ddp_recipes.runtime.seeding import key, rng_states, seeded


class Draw(NamedTuple):
    """A sample, and what its random numbers are keyed by."""

    sample: int
    epoch: int
    number: int  # the sample's, or its place in the epoch where it can come twice


class KeyedDataset(Dataset[Any]):
    """Draws what a sample's random transforms draw from (seed, epoch, sample): the same in any worker of any rank.

    A ``__getitems__`` of the data set fetches a batch at once as long as it draws nothing: what it gives is then what
    each sample by itself would be. Where it draws, samples are fetched again, each with numbers of its own.
    """

    def __init__(self, dataset: Any, seed: int, name: str = "data") -> None:
        self.dataset, self.seed, self.name = dataset, seed, name
        self._at_once = callable(getattr(dataset, "__getitems__", None))

    def __getitems__(self, draws: Sequence[Draw]) -> list[Any]:
        if self._at_once and (samples := self._fetched_at_once(draws)) is not None:
            return samples
        return [self._sample(draw) for draw in draws]

    def _fetched_at_once(self, draws: Sequence[Draw]) -> list[Any] | None:
        with seeded(key(self.seed, *draws[0][1:])):
            before = rng_states()
            try:
                samples: list[Any] = self.dataset.__getitems__([draw.sample for draw in draws])
            except Exception:  # one by one it is raised again, and by which sample is known then
                self._at_once = False
                return None
            self._at_once = rng_states() == before
        return samples if self._at_once else None

    def _sample(self, draw: Draw) -> Any:
        with seeded(key(self.seed, draw.epoch, draw.number)):
            try:
                return self.dataset[draw.sample]
            except Exception as error:
                error.add_note(
                    f"{type(error).__name__} of sample {draw.sample} of {self.name}, a {type(self.dataset).__name__} "
                    f"of {len(self.dataset)}: {error}"
                )
                raise
