"""Lost ranks are replaced in place: what is done to such a run, and what is promised of it beyond what any run is."""

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from benchmarks.campaign.script import IN_STEP, INSIDE, KINDS, ON_NODES, PLAIN, RECIPES, STEPS, Fault, Mode, Script
from benchmarks.campaign.seen import Done, Played

COST = re.compile(r"(?:Replaced|All started again from memory), at the cost of ([\d.]+) s")
AGAIN = re.compile("all start again, from (?:the last checkpoint|step 0)")
STOPPED = re.compile(r"stopped by \w+ before a checkpoint was saved|Nothing is started again")  # before they did
PLACES = {
    "rank": ("starting", "training", "training", "training", "saving", "ending", "replacing", "replacing", "replacing"),
    "server": ("starting", "training", "replacing"),
    "stop": ("training", "training", "saving", "replacing"),
    "worker": ("training",),
    "signal": ("training", "saving", "replacing", "replacing"),
    "node": ("starting", "training", "training", "training", "saving", "replacing"),
    "inside": (*INSIDE[1:], *IN_STEP, *IN_STEP),
}
DRAWN = {
    "kill_rank": "rank",
    "kill_rank_0": "rank",
    "kill_two": "rank",
    "kill_server": "server",
    "stop_server": "server",
    "stop_rank": "stop",
    "kill_worker": "worker",
    "exception": "inside",
    "exit_0": "inside",
    "exit_3": "inside",
    "segfault": "inside",
    "kill_node": "node",
}
ONCE = {"terminate": "signal"}  # beside those
OF_NODES = 3  # as many as this of each other kind
RETURNS = 0.7  # of lost nodes
STOPS = 0.3  # of runs on this machine: told to stop, at the end of all that is done to them, and started again
MOST_S = 30.0  # that a loss may cost on a busy machine, where nobody had to wait for a collective to time out


def draw(
    seed: int,
    mode: Mode,
    number: int,
    most: int,
    sizes: Sequence[int],
    without: Collection[str],
    recipes: Sequence[str] = PLAIN,
) -> Script:
    """Return the script of a run that is started once: on this machine or, in a mode of nodes, on two."""
    dice = random.Random(f"{seed} {mode} {number}")
    several = mode in ON_NODES
    recipe = RECIPES[dice.choice(recipes)]
    count = dice.randint(1, most) if most else 0
    none = {*without, *([] if recipe.workers else ["kill_worker"]), *(["stop_server"] if several else ["kill_node"])}
    possible = [kind for kind in DRAWN if kind not in none]
    possible += ["kill_node"] * (OF_NODES - 1) * ("kill_node" in possible)
    kinds = [dice.choice(possible) for _ in range(count)]
    if "kill_rank" in possible:  # most of what happens
        kinds = [kind if dice.random() < 0.7 else "kill_rank" for kind in kinds]
    steps = sorted(dice.sample(range(2, STEPS - 1), count))
    size = dice.choice([size for size in sizes if size > 1 and (size % 2 == 0 or not several)])
    if "kill_node" in kinds:  # one node may be all there is, with one rank
        kinds = ["kill_rank" if kind == "kill_two" else kind for kind in kinds]
    faults: list[Fault] = []
    away = False
    for place, (kind, step) in enumerate(zip(kinds, steps, strict=True)):
        if kind == "kill_node" and away:
            faults.append(_return(dice))
        faults.append(_fault(kind, step, place, dice, several))
        if kind == "kill_node":
            away = dice.random() > RETURNS
            faults += [] if away else [_return(dice)]
    stops = not several and count and "terminate" not in without and dice.random() < STOPS
    if stops:
        faults = faults[:-1] if faults[-1].place == "ending" else faults  # nothing comes after
        faults.append(_fault("terminate", min(steps[-1] + 1, STEPS - 2), len(faults), dice, several))
    timeout_s = 60 if "stop_rank" not in kinds else 12 if several else 8  # where all may have to load torch again
    return Script(
        mode,
        seed,
        number,
        recipe.name,
        tuple(faults),
        (size,) * (2 if stops else 1),
        max_restarts=0,
        timeout_s=timeout_s,
    )


def resumed(script: Script) -> Script:
    """Return a script with a first start that is told to stop, so that all that is done is done to a resumed run."""
    dice = random.Random(f"{script.seed} {script.mode} {script.number} resumed")
    soon = min([STEPS // 2, *(fault.step for fault in script.faults if fault.step)])
    stop = Fault("terminate", "training", dice.randrange(1, max(2, soon)), wait_s=0.0, share=0.0, pause_s=0.0)
    return replace(script, faults=(stop, *script.faults), world_sizes=(script.world_sizes[0], *script.world_sizes))


def copies(strategy: Sequence[str], world_size: int) -> int:
    """Return how many ranks have each part of the model's state."""
    name, *others = strategy
    if name == "strategy=ddp_pipeline":
        return world_size // 2
    if name == "strategy=fsdp":
        return next((int(other.partition("replicas=")[2]) for other in others if "replicas=" in other), 1)
    return world_size


def _return(dice: random.Random) -> Fault:
    """Return that a node comes back, soon after it was lost."""
    return Fault("return_node", "returning", 0, wait_s=round(dice.uniform(0, 8), 4), share=0.0, pause_s=0.0)


def _fault(kind: str, step: int, number: int, dice: random.Random, several: bool) -> Fault:
    places = [place for place in PLACES[(DRAWN | ONCE)[kind]] if place != ("replacing" if number == 0 else "starting")]
    if number == 0 and DRAWN.get(kind) == "inside" and not (several and kind == "exception"):  # which ends such a run
        places.append("making")
    place = dice.choice(places)
    wait_s = {"starting": 4.0, "replacing": 1.5, "ending": 0.6}.get(place, 0.04)
    early = place in ("starting", "making", "replacing")
    return Fault(
        kind=kind,
        place=place,
        step=0 if early else STEPS if place == "ending" else step,
        wait_s=round(dice.uniform(0, wait_s), 4),
        share=round(dice.random(), 6),
        pause_s=0.0,
    )


def costs(played: Played) -> list[float]:
    """Return what each loss cost, in seconds, as the run says it."""
    return [float(seconds) for started in played.starts for seconds in COST.findall(started.text)]


def flaws(played: Played, summary: dict[str, Any], lost_steps: Sequence[int]) -> list[str]:
    """Return what of the promises on replaced ranks does not hold, where each loss took so many steps."""
    found: list[str] = []
    again = started_again(played)
    told = costs(played)  # of two ranks that were lost at once, twice
    counted, seconds = len(told), sum(started.seconds for started in played.starts)
    deaths = [done for done in played.done if done.fault.kind not in ("return_node", "terminate") and not done.idle]
    lost = [(done, _ranks_lost(done, played)) for done in deaths]
    losses = sum(ranks for _, ranks in lost)
    late = sum(
        ranks
        for done, ranks in lost
        if done.fault.place == "ending" or done.step >= STEPS - 1 or beside_another(done, played)
    )
    if again > (may := sum(_may_start_again(done, played) for done in deaths)):
        found.append(f"all ranks started again {again} times, {may} may be")
    if summary["ranks_replaced"] != counted:
        found.append(f"ranks_replaced is {summary['ranks_replaced']}, {counted} losses are told")
    least = losses - late - sum(ranks - 1 for done, ranks in lost if done.fault.kind == "kill_server")
    idle = sum(done.idle for done in played.done if done.fault.kind == "kill_node")  # as nodes met: it may be told
    if not again and not least <= counted <= losses + idle:
        found.append(f"{counted} losses are told, there were {losses}")
    most = sum(told) + 0.1 * len(told) if max(lost_steps, default=0) <= 1 else seconds  # steps done again count
    if not again and not sum({*told}) - 0.1 * len(told) <= summary["seconds_lost"] <= most:
        found.append(f"seconds_lost is {summary['seconds_lost']:.1f}, told are {told}")
    if not 0 <= summary["seconds_lost"] <= seconds or (counted and not summary["seconds_lost"]):
        found.append(f"seconds_lost is {summary['seconds_lost']} of {seconds:.1f}")
    if played.script.timeout_s > MOST_S and told and max(told) > MOST_S:
        found.append(f"a loss cost {max(told):.1f} s")
    return found


def _ranks_lost(done: Done, played: Played) -> int:
    """Return how many ranks it took at most, each of which is named; a lost node is one loss."""
    if done.fault.kind == "kill_server" and played.script.mode in ON_NODES:
        return done.world_size // 2
    return 2 if done.fault.kind == "kill_two" else 1


def _may_start_again(done: Done, played: Played) -> bool:
    """Whether nobody may have been left who had the state."""
    return (
        done.fault.kind in ("kill_server", "stop_server")
        or done.fault.place in ("starting", "making", "replacing", "ending")
        or played.copies <= (2 if done.fault.kind == "kill_two" else 1)
        or played.script.may_be_hurt == 1
        or done.step >= STEPS - 1
        or _close_to_another(done, played)
    )


def _close_to_another(done: Done, played: Played) -> bool:
    """Whether another loss was so near that both may have been there at once."""
    others = [each for each in played.done if each is not done and each.fault.kind != "terminate"]
    return any(abs(each.at - done.at) < 3 or abs(each.step - done.step) <= 2 for each in others)


def may_lose_all(played: Played) -> bool:
    """Whether there may be an instant without any rank that could save: all are lost, or have yet to begin."""
    return any(
        done.fault.kind in ("kill_server", "stop_server")
        or done.fault.place in ("starting", "making", "ending")
        or done.step >= STEPS - 1
        or played.copies <= (2 if done.fault.kind == "kill_two" or _close_to_another(done, played) else 1)
        for done in played.done
        if done.fault.kind != "terminate"
    )


def beside_another(done: Done, played: Played) -> bool:
    """Whether it may have hit ranks that were about to end because of another loss, which is the one named.

    On nodes all ranks end and others begin after each loss, also one that has yet to miss its data worker. One that is
    stopped may die of the next loss.
    """
    later = [each for each in played.done if 0 < each.at - done.at < played.script.timeout_s]
    if done.fault.kind == "stop_rank" and any(each.fault.kind in ("kill_server", "kill_node") for each in later):
        return True
    near = any(abs(each.at - done.at) < 5 for each in played.done if each is not done)
    unnoticed = done.fault.place == "replacing" or done.fault.kind == "kill_worker"
    return near and (started_again(played) > 0 or (played.script.mode in ON_NODES and unnoticed))


def started_again(played: Played) -> int:
    """Return how often all ranks started again, from the last checkpoint or without one, or were about to."""
    begun = [text for started in played.starts for text in started.text.split("\nddp_recipes ")]
    return sum(len(AGAIN.findall(text)) or len(STOPPED.findall(text)) for text in begun)


def killed_all(played: Played) -> int:
    """Return how often all ranks were killed at once: what any of them had kept may be of an earlier step."""
    return sum(done.fault.kind == "kill_two" and done.world_size == 2 for done in played.done)


def histogram(seconds: Sequence[float]) -> list[list[str]]:
    """Return how many losses cost how much."""
    edges = [0, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 60, float("inf")]
    rows = [["seconds lost by a loss", "losses"]]
    for low, high in pairwise(edges):
        if count := sum(low <= each < high for each in seconds):
            rows.append([f"{low:g} to {high:g}", str(count)])
    return rows


assert DRAWN.keys() <= KINDS.keys()
