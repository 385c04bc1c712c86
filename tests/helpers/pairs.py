"""Tables of cases in which any two values of different columns come together."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
TRIES = 50  # random cases for each one that is taken


def pairwise(columns: Mapping[str, Sequence[Any]], seed: int) -> list[Case]:
    """Return cases, each with a value for every column, among which each pair of values is at least once."""
    chance = random.Random(seed)
    missing = {
        ((one, a), (other, b))
        for one, other in combinations(columns, 2)
        for a in range(len(columns[one]))
        for b in range(len(columns[other]))
    }
    cases: list[Case] = []
    while missing:
        fixed = dict(chance.choice(sorted(missing)))
        tries = [
            {name: fixed.get(name, chance.randrange(len(values))) for name, values in columns.items()}
            for _ in range(TRIES)
        ]
        best = max(tries, key=lambda each: len(missing & {*combinations(each.items(), 2)}))
        missing -= {*combinations(best.items(), 2)}
        cases.append({name: columns[name][place] for name, place in best.items()})
    return cases
