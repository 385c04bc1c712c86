"""Keyed randomness: every random choice is a function of (seed, epoch, step, sample), never of rank or time."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_STEPS = 256  # whose keys are computed at once


def key(seed: int, *parts: int) -> int:
    """Mix a seed and any whole numbers into 63 bits; nearby inputs give unrelated outputs.

    The mixer is the finaliser of SplitMix64 (Steele, Lea & Flood, 2014), applied once for each part.
    """
    state = seed & _MASK
    for part in (len(parts), *parts):
        state = _mix(state, part & _MASK)
    mixed: int = state >> 1
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


def seed_step(value: int, devices: Sequence[torch.device]) -> None:
    """Seed torch's generators on the CPU and on the given CUDA devices: what dropout of this step draws from.

    It seeds those generators alone; ``torch.manual_seed`` visits every backend and costs several times as much.
    """
    torch.default_generator.manual_seed(value)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(value)


def seed_everything(value: int) -> None:
    """Seed torch (all devices), Python's ``random`` and NumPy."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def rng_states() -> tuple[object, ...]:
    """Return the states of the CPU generators that transforms use, to compare."""
    of_numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy[1].tobytes(), *of_numpy[2:]


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Seed the CPU generators that transforms use (torch, ``random``, NumPy); the former states come back after."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
