"""From a trace to where the time of its steps went, and a picture of that."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.autograd.profiler_util import FunctionEvent

from ddp_recipes.reporting.figures import as_png
from ddp_recipes.runtime.phases import ALL_REDUCE

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


BETWEEN_STEPS = "validated or saved"  # a mark in a trace: what came before it belongs to no step
OTHER = "other"


@dataclass
class Breakdown:
    """Where the time of the mean step goes, in ms.

    Attributes:
        steps: how many there were.
        host: of the thread that runs the loop, by phase; they add up to the step.
        device: of the kernels that a phase started; empty without a GPU.
        beside: of an all-reduce that went on while backward did something else.
    """

    steps: int
    host: dict[str, float]
    device: dict[str, float]
    beside: float

    @property
    def title(self) -> str:
        """The headline of the table of times."""
        return f"where a step's time goes, mean of {self.steps} step{'' if self.steps == 1 else 's'} on rank 0"

    def cells(self) -> list[list[str]]:
        """Return the rows of a table, and at last their sums."""
        step = sum(self.host.values())
        rows = [[name, f"{took:.3f} ms", f"{took / step:.0%}"] for name, took in self.host.items()]
        rows.append(["step", f"{step:.3f} ms", "100%"])
        if self.device:
            busy = [*self.device.values(), sum(self.device.values())]
            rows = [[*row, f"GPU {took:.3f} ms"] for row, took in zip(rows, busy, strict=True)]
        return rows

    def notes(self) -> list[str]:
        """Return what a table cannot say."""
        return [f"{self.beside:.3f} ms more of {ALL_REDUCE} went on beside backward"] if self.beside else []

    def text(self) -> str:
        """Return the table for a log."""
        cells = self.cells()
        first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
        lines = [
            "  ".join([f"  {name:<{first}}", *(f"{value:>{width}}" for value, width in zip(row, others, strict=True))])
            for name, *row in cells
        ]
        return "\n".join([self.title, *lines, *(f"  {note}" for note in self.notes())])

    def markdown(self) -> str:
        """Return the table for TensorBoard."""
        cells = self.cells()
        columns = ["", "time", "share", "kernels"][: len(cells[0])]
        table = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
        lines = [f"| {' | '.join(row)} |" for row in table]
        return "\n".join([self.title, "", *lines, *(f"\n{note}" for note in self.notes())])


def breakdown(events: Sequence[FunctionEvent], passes: Sequence[str]) -> Breakdown | None:
    """Return where the time of the steps in a trace goes, or ``None`` if there is no whole step in it.

    Args:
        passes: what forward and backward are called.
    """
    cpu = [event for event in events if event.device_type.name == "CPU"]
    names = ["data", *passes, ALL_REDUCE, "optimizer", "logging"]
    ranges = [
        event for event in cpu if event.name in names and event.cpu_parent is not None and _is_step(event.cpu_parent)
    ]
    steps = [
        window
        for window in _windows(cpu)
        if any(event.name == "optimizer" and _starts_in(event, window) for event in ranges)
    ]
    if not steps:
        return None
    spans = {
        name: [_span(each) for each in ranges if each.name == name and any(_starts_in(each, step) for step in steps)]
        for name in names
    }
    waits, beside = _all_reduces(cpu)
    host = {name: length(minus(spans[name], waits if name in passes else [])) for name in names}
    in_passes = [span for name in passes for span in spans[name]]
    host[ALL_REDUCE] += length(common(in_passes, waits))
    host[OTHER] = length(steps) - sum(host.values())
    device = _kernels(cpu, steps, spans, passes)
    scale = 1e-3 / len(steps)  # from µs of all to ms of one
    return Breakdown(
        len(steps),
        {name: took * scale for name, took in host.items()},
        {name: took * scale for name, took in device.items()},
        length(common(in_passes, beside)) * scale,
    )


def _is_step(event: FunctionEvent) -> bool:
    name: str = event.name
    return name.startswith("ProfilerStep")


def _span(event: FunctionEvent) -> Interval:
    return event.time_range.start, event.time_range.end


def _starts_in(event: FunctionEvent, window: Interval) -> bool:
    start: float = event.time_range.start
    return window[0] <= start < window[1]


def _windows(cpu: Sequence[FunctionEvent]) -> list[Interval]:
    """Return when steps were, without the validation and the saving that came before."""
    ends = [event.time_range.end for event in cpu if event.name == BETWEEN_STEPS]
    return [
        (max([start, *(at for at in ends if start <= at <= end)]), end)
        for start, end in map(_span, filter(_is_step, cpu))
    ]


def _all_reduces(cpu: Sequence[FunctionEvent]) -> tuple[list[Interval], list[Interval]]:
    """Return when an all-reduce held backward up, and when one went on while autograd worked.

    The host does not wait for NCCL: what its kernels take is time of the device.
    """
    held_up = [_span(event) for event in cpu if event.name in (ALL_REDUCE, "c10d::allreduce_")]
    under_way = [_span(event) for event in cpu if event.is_async and event.name == "gloo:all_reduce"]
    nodes = [_span(event) for event in cpu if event.name.startswith("autograd::engine::evaluate_function")]
    at_work = minus(nodes, held_up)
    return minus([*held_up, *under_way], at_work), common(under_way, at_work)


def _kernels(
    cpu: Sequence[FunctionEvent],
    steps: Sequence[Interval],
    spans: dict[str, list[Interval]],
    passes: Sequence[str],
) -> dict[str, float]:
    """Return how long kernels ran that a phase started, from whatever thread: backward has its own on a GPU."""
    found = dict.fromkeys([*spans, OTHER], 0.0)
    launches = [event for event in cpu if event.kernels and any(_starts_in(event, step) for step in steps)]
    for event in launches:
        phase = next((name for name in spans if any(_starts_in(event, span) for span in spans[name])), OTHER)
        for kernel in event.kernels:
            if kernel.name != event.name:  # else what torch draws of a range on the device
                exchange = phase in passes and "AllReduce" in kernel.name
                found[ALL_REDUCE if exchange else phase] += kernel.duration
    return found if launches else {}


def draw_profile(times: Mapping[str, float], title: str) -> bytes:
    """Return a PNG with a bar for each phase of a step, whose ``times`` are in ms."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.35 * len(times)), layout="constrained")
    axis = figure.add_subplot()
    bars = axis.barh(list(times), list(times.values()), height=0.7, color="#3b6ea8")
    step = sum(times.values())
    axis.bar_label(bars, [f"{took:.3f} ms, {took / step:.0%}" for took in times.values()], padding=4, fontsize=9)
    axis.set_xlim(0, 1.25 * max(times.values()))
    axis.invert_yaxis()
    axis.set_title(title, fontsize=11, loc="left")
    axis.tick_params(length=0)
    axis.xaxis.set_visible(False)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    return as_png(figure)
