"""Tables of cases in which any two values of different columns come together."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
TRIES = 50  # random cases for each one that is taken


def pairwise(
    columns: Mapping[str, Sequence[Any]], seed: int, possible: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return cases, each with a value for every column, among which each pair of values is at least once.

    Args:
        possible: whether there can be such a case. A pair that is found in none is left out.
    """
    chance = random.Random(seed)
    missing = {
        ((one, a), (other, b))
        for one, other in combinations(columns, 2)
        for a in range(len(columns[one]))
        for b in range(len(columns[other]))
    }

    def named(places: Mapping[str, int]) -> Case:
        return {name: columns[name][place] for name, place in places.items()}

    cases: list[Case] = []
    while missing:
        pair = chance.choice(sorted(missing))
        fixed = dict(pair)
        tries = [
            {name: fixed.get(name, chance.randrange(len(values))) for name, values in columns.items()}
            for _ in range(TRIES)
        ]
        if fitting := [each for each in tries if possible(named(each))]:
            best = max(fitting, key=lambda each: len(missing & {*combinations(each.items(), 2)}))
            missing -= {*combinations(best.items(), 2)}
            cases.append(named(best))
        else:
            missing.remove(pair)
    return cases
