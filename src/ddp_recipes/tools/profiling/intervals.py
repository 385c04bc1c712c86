"""Sets of points on a line, as intervals."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the points of all given ones."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def minus(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return the points that are in some interval and in none of the others."""
    found, rest = [], union(others)
    at = 0
    for start, end in union(intervals):
        while at < len(rest) and rest[at][1] <= start:
            at += 1
        for left, right in rest[at:]:
            if left >= end:
                break
            if left > start:
                found.append((start, left))
            start = right
        if start < end:
            found.append((start, end))
    return found


def common(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return the points that are in both."""
    mine = union(intervals)
    return minus(mine, minus(mine, others))


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of all of them together."""
    return sum(end - start for start, end in union(intervals))
