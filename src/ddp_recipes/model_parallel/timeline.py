"""In which order the stages of a pipeline work, by the name of its schedule. Loads no torch."""

from dataclasses import dataclass
from itertools import count

from ddp_recipes.config.parallelism import PipelineShape

FORWARD, BACKWARD = "F", "B"
LENGTH = {FORWARD: 1, BACKWARD: 2}  # of a micro-batch in a stage: backward computes gradients of inputs and of weights


@dataclass(frozen=True)
class Work:
    """One micro-batch in one stage, forward or backward."""

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Cell:
    """When a process does a piece of work, in units of a forward pass through one stage."""

    work: Work
    start: int
    end: int


def order(schedule: str, stages: int, processes: int, micro_batches: int) -> list[list[Work]]:
    """Return each process's work in the order in which it does it.

    ``gpipe`` is that of Huang et al. (2019), ``1f1b`` that of PipeDream-Flush and ``interleaved_1f1b`` that of
    Narayanan et al. (2021), as ``torch.distributed.pipelining`` has them.
    """
    each = stages // processes  # stages of a process
    total = each * micro_batches
    rounds = max(1, micro_batches // processes)
    together = micro_batches // rounds if each > 1 else micro_batches  # micro-batches in a stage before the next one
    orders = []
    for process in range(processes):
        if schedule == "gpipe":
            warm_up = total
        elif each == 1:
            warm_up = min(total, processes - process)
        else:
            warm_up = min(total, (each - 1) * together + 2 * (processes - 1 - process) + 1)
        forward = _passes(FORWARD, range(each), process, processes, together, total)
        backward = _passes(BACKWARD, range(each)[::-1], process, processes, together, total)
        done = forward[:warm_up]  # before the first backward pass
        for number in range(total):
            done.append(backward[number])
            done += forward[warm_up + number : warm_up + number + 1]
        orders.append(done)
    return orders


def _passes(kind: str, turns: range, process: int, processes: int, together: int, total: int) -> list[Work]:
    """Return the passes of one kind: so many micro-batches together through each of the process's stages in turn."""
    counts = {turn: count() for turn in turns}
    works = []
    for number in range(total):
        turn = turns[number // together % len(turns)]
        works.append(Work(kind, turn * processes + process, next(counts[turn])))
    return works


def timeline(orders: list[list[Work]], stages: int) -> list[list[Cell]]:
    """Return when each process does its work, if every stage takes equally long and nothing else takes time."""
    ends: dict[Work, int] = {}
    cells: list[list[Cell]] = [[] for _ in orders]
    while any(len(done) < len(works) for done, works in zip(cells, orders, strict=True)):
        for done, works in zip(cells, orders, strict=True):
            while len(done) < len(works) and (needed := _before(works[len(done)], stages)) <= ends.keys():
                work = works[len(done)]
                start = max([done[-1].end if done else 0, *(ends[each] for each in needed)])
                done.append(Cell(work, start, start + LENGTH[work.kind]))
                ends[work] = done[-1].end
    return cells


def _before(work: Work, stages: int) -> set[Work]:
    """Return what has to be done before: the stage before, in the direction of the pass, and the forward pass."""
    if work.kind == FORWARD:
        return {Work(FORWARD, work.stage - 1, work.micro_batch)} if work.stage else set()
    after = {Work(BACKWARD, work.stage + 1, work.micro_batch)} if work.stage < stages - 1 else set()
    return after | {Work(FORWARD, work.stage, work.micro_batch)}


def requested(orders: list[list[Work]], stages: int) -> list[list[list[Work]]]:
    """Return, for each process and each piece of its work, the inputs it requests before: those sent in the meantime.

    So ``torch.distributed.pipelining`` does it where a process has several stages: processes take turns, one piece of
    work each, and who is done with one has the receiver request it.
    """
    done: set[Work] = set()
    at = [0] * len(orders)
    needed: list[list[list[Work]]] = [[[] for _ in works] for works in orders]
    while any(number < len(works) for number, works in zip(at, orders, strict=True)):
        for process, works in enumerate(orders):
            if at[process] == len(works) or not _before(work := works[at[process]], stages) <= done:
                continue
            done.add(work)
            at[process] += 1
            receiver = work.stage + (1 if work.kind == FORWARD else -1)
            if 0 <= receiver < stages:
                other = receiver % len(orders)
                needed[other][at[other]].append(Work(work.kind, receiver, work.micro_batch))
    return needed


def bubble(cells: list[list[Cell]]) -> float:
    """Return the fraction of the time in which processes wait."""
    span = max(done[-1].end for done in cells)
    busy = sum(cell.end - cell.start for done in cells for cell in done)
    return 1 - busy / (span * len(cells))


def cells_of(pipeline: PipelineShape) -> list[list[Cell]]:
    """Return when the processes of a pipeline work, if all stages take equally long."""
    works = order(pipeline.schedule, pipeline.stages, pipeline.processes, pipeline.micro_batches)
    return timeline(works, pipeline.stages)
