"""Keyed randomness: what many at once give is what one alone does."""

import random
from collections.abc import Callable, Collection

import numpy as np
import pytest
import torch

from ddp_recipes.runtime.seeding import Generators, key, keys, seeded, step_key


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1, 2**64 - 1, -3])
def test_keys_of_steps_in_a_row_are_the_keys_of_each(seed: int) -> None:
    for part in (0, 1, 63):
        for step in (*range(600), 10**6, 10**9, 2**40):
            assert step_key(seed, step, part) == key(seed, step, part)


def test_keys_do_not_change_with_a_release() -> None:
    """A run that another release began goes on with the same numbers."""
    assert key(42, 3, 0) == 1969670113858555753
    assert key(0) == key(2**64) != key(0, 0)


def drawn(
    generators: Generators, steps: range, uses: Callable[[int], bool], shards: Collection[int] = (3,)
) -> dict[tuple[int, int], tuple[float, ...]]:
    """Return what each shard of each step draws, where ``uses`` says that it does."""
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for step in steps:
        for shard in shards:
            generators.begin(step, shard)
            if uses(step):
                found[step, shard] = random.random(), random.gauss(0, 1), np.random.randn(), *np.random.rand(312)
    return found


@pytest.mark.parametrize(
    "uses",
    [lambda step: True, lambda step: step >= 300, lambda step: step in (256, 257, 400, 511, 512, 600)],
    ids=["always", "late", "at times"],
)
def test_draws_of_a_step_are_the_same_wherever_a_run_goes_on(uses: Callable[[int], bool]) -> None:
    with seeded(0):
        whole = Generators(42, [torch.device("cpu")], rank=0, drawn=False)
        whole.settle(0)
        states: dict[int, bool] = {}
        expected: dict[tuple[int, int], tuple[float, ...]] = {}
        for step in range(700):
            expected |= drawn(whole, range(step, step + 1), uses)
            if step % 50 == 0 or step in (254, 255, 256, 298, 299, 511):  # a checkpoint, which must change nothing
                whole.check()
                whole.settle(step + 1)
                states[step + 1] = whole.drawn
        assert len({values[0] for values in expected.values()}) == len(expected) > 5
        for start, flag in states.items():
            np.random.seed(start)
            again = Generators(42, [torch.device("cpu")], rank=0, drawn=flag)
            again.settle(start)
            found = drawn(again, range(start, 700), uses)
            assert found == {place: values for place, values in expected.items() if place[0] >= start}, start


def test_draws_of_fixed_shards_do_not_depend_on_who_has_them() -> None:
    with seeded(0):
        one = drawn(Generators(42, [], rank=0, drawn=True), range(5), lambda step: step > 2, range(4))
        two = [
            drawn(Generators(42, [], rank=rank, drawn=True), range(5), lambda step: step > 2, shards)
            for rank, shards in enumerate((range(2), range(2, 4)))
        ]
        assert one == two[0] | two[1]


def test_many_keys_at_once_are_those_of_each() -> None:
    numbers = np.array([0, 1, 5, 2**63], dtype=np.uint64)
    assert keys(-3, 7, numbers).tolist() == [key(-3, 7, number) for number in numbers.tolist()]
    assert keys(numbers, 2).tolist() == [key(number, 2) for number in numbers.tolist()]
