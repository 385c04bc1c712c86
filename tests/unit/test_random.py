"""Keyed randomness: what many at once give is what one alone does."""

import pytest

from ddp_recipes.runtime.seeding import key, step_key


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1, 2**64 - 1, -3])
def test_keys_of_steps_in_a_row_are_the_keys_of_each(seed: int) -> None:
    for part in (0, 1, 63):
        for step in (*range(600), 10**6, 10**9, 2**40):
            assert step_key(seed, step, part) == key(seed, step, part)


def test_keys_do_not_change_with_a_release() -> None:
    """A run that another release began goes on with the same numbers."""
    assert key(42, 3, 0) == 1969670113858555753
    assert key(0) == key(2**64) != key(0, 0)
