"""Keyed randomness: every random choice is a function of (seed, epoch, step, sample), never of rank or time."""

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_recipes import devices as devices_

log = logging.getLogger(__name__)

_MASK = (1 << 64) - 1
_STEPS = 256  # whose keys are computed at once
_UPDATE = 1 << 32  # what comes after the passes of a step: no shard has this number


def key(seed: int, *parts: int) -> int:
    """Mix a seed and any whole numbers into 63 bits; nearby inputs give unrelated outputs.

    The mixer is the finaliser of SplitMix64 (Steele, Lea & Flood, 2014), applied once for each part.
    """
    state = seed & _MASK
    for part in (len(parts), *parts):
        state = _mix(state, part & _MASK)
    mixed: int = state >> 1
    return mixed


def keys(seeds: Any, *parts: Any) -> NDArray[np.uint64]:
    """Return :func:`key` of many at once: of seeds and parts some are arrays of uint64, the others hold for each."""
    state, *others = (np.atleast_1d(np.asarray(each & _MASK, dtype=np.uint64)) for each in (seeds, len(parts), *parts))
    for part in others:
        state = _mix(state, part)
    mixed: NDArray[np.uint64] = state >> np.uint64(1)
    return mixed


def step_key(seed: int, step: int, part: int) -> int:
    """Return ``key(seed, step, part)``. For steps in a row that is quick: one alone takes Python microseconds."""
    return _step_keys(seed, step // _STEPS, part)[step % _STEPS]


@lru_cache(maxsize=256)
def _step_keys(seed: int, block: int, part: int) -> list[int]:
    steps = np.arange(block * _STEPS, (block + 1) * _STEPS, dtype=np.uint64)
    count = np.full(_STEPS, _mix(seed & _MASK, 2), dtype=np.uint64)  # of parts, of which there are two
    keys: list[int] = (_mix(_mix(count, steps), np.full(_STEPS, part, dtype=np.uint64)) >> 1).tolist()
    return keys


def _mix(state: Any, part: Any) -> Any:
    """Mix a part into 64 bits of state: numbers of Python's, or as many of NumPy's uint64 in each."""
    state = (state + 0x9E3779B97F4A7C15 + part) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def seed_step(value: int, devices: Iterable[torch.device]) -> None:
    """Seed what a step may draw from: torch's generators on the CPU and on these devices, ``random``, NumPy."""
    seed_torch(value, devices)
    _seed_others(value)


def seed_torch(value: int, devices: Iterable[torch.device]) -> None:
    """Seed these generators alone; ``torch.manual_seed`` visits every backend and costs several times as much."""
    torch.default_generator.manual_seed(value)
    for device in devices:
        if devices_.is_accelerator(device):
            devices_.seed(device, value)


def _seed_others(value: int) -> None:
    random.seed(value)
    np.random.seed(value >> 31)  # not the bits that torch takes for the same kind of generator


class Twins:
    """Tell whether something has drawn from ``random`` or NumPy, which take 9 µs to seed: twins that draw along."""

    def __init__(self) -> None:
        self._random, self._numpy = random.Random(), np.random.RandomState()

    def settle(self, value: int) -> None:
        """Seed both, and the twins."""
        _seed_others(value)
        self._random.seed(value)
        self._numpy.seed(value >> 31)

    def differ(self) -> bool:
        """Draw from all of them; return whether something else has since :meth:`settle`."""
        return random.random() != self._random.random() or np.random.random_sample() != self._numpy.random_sample()


class Generators:
    """What a rank's steps draw from: torch's generators, ``random`` and NumPy, a function of the step and the shard.

    The last two are seeded from when a step has drawn from them. Before, they follow a sequence that is keyed by rank
    and block of steps. Each step takes a number of it: if it is not that of a twin, the step before has drawn.

    Attributes:
        drawn: whether some step did; a checkpoint has to keep it.
    """

    def __init__(self, seed: int, devices: Sequence[torch.device], rank: int, drawn: bool) -> None:
        self.seed, self.rank, self.drawn = seed, rank, drawn
        self.devices = [*filter(devices_.is_accelerator, devices)]  # looked at once, for that takes a microsecond
        self._twins = Twins()
        self._given: set[int] = set()  # seeds of the shards of this step
        self._told = False

    def begin(self, step: int, shard: int) -> None:
        """Seed a shard of a step."""
        self._look()
        value = step_key(self.seed, step, shard)
        self._given.add(value)
        seed_torch(value, self.devices)
        if not self.drawn:
            self.check()
            if step % _STEPS == 0:
                self.settle(step)
        if self.drawn:
            _seed_others(value)

    def end(self, step: int) -> None:
        """Seed what comes after the passes of a step, such as an optimizer that draws: the same on all ranks."""
        self._look()
        self._given.clear()
        value = step_key(self.seed, step, _UPDATE)
        seed_torch(value, self.devices)
        if self.drawn:
            _seed_others(value)

    def _look(self) -> None:
        """Say once on rank 0 where what a shard has run has seeded torch."""
        if self._told or self.rank or not self._given or torch.default_generator.initial_seed() in self._given:
            return
        self._told = True
        log.warning(
            "A step seeds torch by itself (torch.seed, torch.manual_seed), and what it draws from there on does not "
            "follow from seed=%d, the step and the samples: a run may not be repeated, nor be the same on another "
            "number of ranks. Leave that out: each step is seeded.",
            self.seed,
        )

    def check(self) -> None:
        """Note whether something has drawn from ``random`` or NumPy since :meth:`settle` or the last step began."""
        if self._twins.differ():
            self.drawn = True

    def settle(self, step: int) -> None:
        """Leave ``random`` and NumPy as they are before a step, for whatever else has seeded them."""
        self._given.clear()
        if self.drawn:
            return
        block, number = divmod(step, _STEPS)
        self._twins.settle(key(self.seed, self.rank, block, 0))
        for _ in range(1, number):
            self.check()


def seed_everything(value: int) -> None:
    """Seed torch (all devices), Python's ``random`` and NumPy."""
    torch.manual_seed(value)
    seed_cpu(value)


_States = tuple[torch.Tensor, tuple[Any, ...], Any]


def rng_states() -> _States:
    """Return the states of the CPU generators that transforms use: torch's, those of ``random`` and of NumPy."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_rng_states(states: _States) -> None:
    """Set the CPU generators to these states."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def are_rng_states(states: _States) -> bool:
    """Whether nothing was drawn from the CPU generators since they were in these states."""
    now: Any = np.random.get_state()
    then = states[2]
    return (
        torch.equal(torch.get_rng_state(), states[0])
        and random.getstate() == states[1]
        and now[2:] == then[2:]
        and np.array_equal(now[1], then[1])
    )


@contextmanager
def restored() -> Iterator[None]:
    """Leave the CPU generators (torch, ``random``, NumPy) in the states in which they were."""
    states = rng_states()
    try:
        yield
    finally:
        set_rng_states(states)


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Seed the CPU generators that transforms use (torch, ``random``, NumPy); the former states come back after."""
    with restored():
        seed_cpu(value)
        yield


def seed_cpu(value: int) -> None:
    """Seed the CPU generators that transforms use (torch, ``random``, NumPy)."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
