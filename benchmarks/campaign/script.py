"""The script of a run: what is done to it, when, and at which world sizes. A pure function of (seed, mode, number)."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

# The last three: in one start, which goes on beyond losses; on this machine, and on two nodes of a Slurm, which meet at
# the first one, or in a file.
Mode = Literal["local", "torchrun", "replace", "nodes", "any_node"]
MODES: tuple[Mode, ...] = ("local", "torchrun", "replace", "nodes", "any_node")
ON_NODES: tuple[Mode, ...] = ("nodes", "any_node")
GOES_ON: tuple[Mode, ...] = ("replace", *ON_NODES)
STEPS = 60
SIZES = (1, 1, 2, 2, 3, 4, 6)  # of the world, the likely ones more than once
TEXT = "the cat sat on the keyboard"  # of the exception


@dataclass(frozen=True)
class Recipe:
    """What is trained.

    Attributes:
        interval: steps from one checkpoint to the next.
        under_way: steps that training may be ahead of a save that is still being written.
        workers: whether it has data workers.
        shards: whether its samples lie in shards.
    """

    name: str
    overrides: tuple[str, ...]
    interval: int
    under_way: int = 0
    workers: bool = False
    shards: bool = False


RANDOM = (
    "data=random",
    "data.num_samples=250",  # 11 batches an epoch, the last one of 10 samples
    "data.val_samples=40",
)
SHARDS = "${oc.env:CAMPAIGN_SHARDS}"
STREAM = (
    "data=stream",
    "data.val_fraction=0.138",  # as many samples
    "data.inputs=inputs",
    "data.targets=targets",
    "data.in_features=10",
    "data.out_features=5",
    "data.window=60",
    "data.interleave=3",
    "data.cache.folder=${oc.env:CAMPAIGN_FOLDER}/cache",
    "task=regression",
)
_OF_SHARDS = f"{{_target_: ddp_recipes.streams.Stream, path: '{SHARDS}/parquet', inputs: inputs, targets: targets}}"
_FEATURES = "in_features: 10, out_features: 5"
_MADE = f"{{_target_: benchmarks.campaign.parts.Noisy, num_samples: 60, {_FEATURES}, seed: 1, split: train}}"
_VAL = _MADE.replace("60", "40").replace("train", "val")
MIXTURE = (
    "data=mixture",
    f"data.sources={{shards: {_OF_SHARDS}, made: {_MADE}}}",
    "data.source_weights={shards: 3, made: 1}",
    "data.num_samples=250",
    "data.block=40",
    f"data.val={_VAL}",
    "data.in_features=10",
    "data.out_features=5",
    "task=regression",
)
COMMON = (
    "data.global_batch_size=24",
    "model._target_=benchmarks.campaign.parts.Disturbed",
    "model.hidden_features=[256,256]",  # 0.6 to 0.9 MB with the optimizer's state: a save takes a few milliseconds
    "+callbacks.journal._target_=benchmarks.campaign.parts.Journal",
    "trainer.max_epochs=null",
    f"trainer.max_steps={STEPS}",
    "trainer.num_sanity_val_steps=1",
    "launcher.device=cpu",
)
# Samples that are read one by one, so that data workers have something to do.
NOISY = tuple(f"data.{split}._target_=benchmarks.campaign.parts.Noisy" for split in ("train", "val"))

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "momentum",
            (*RANDOM, "checkpoint.every_n_steps=5", "trainer.log_every_n_steps=1", "scheduler=cosine"),
            interval=5,
        ),
        Recipe(
            "async",
            (
                *RANDOM,
                "checkpoint.every_n_steps=4",
                "checkpoint.async_save=true",
                "trainer.log_every_n_steps=3",
                "trainer.val_check_interval=4",
                "optimizer=adam",
                "optimizer.lr=0.003",
            ),
            interval=4,
            under_way=4,
        ),
        Recipe(
            "workers",
            (*RANDOM, *NOISY, "data.num_workers=1", "checkpoint.every_n_steps=6", "trainer.log_every_n_steps=2"),
            interval=6,
            workers=True,
        ),
        Recipe(
            "epochs",
            (
                *RANDOM,
                "checkpoint.every_n_epochs=1",
                "trainer.accumulate_grad_batches=2",
                "trainer.gradient_clip_val=0.5",
                "trainer.log_every_n_steps=1",
                "scheduler=step",
            ),
            interval=6,
        ),
        Recipe(
            "stream",
            (
                *STREAM,
                f"data.path={SHARDS}/parquet",
                "data.train.transform={_target_: benchmarks.campaign.parts.Noise}",
                "data.num_workers=1",
                "checkpoint.every_n_steps=5",
                "trainer.log_every_n_steps=1",
            ),
            interval=5,
            workers=True,
            shards=True,
        ),
        Recipe(  # of shards that are decompressed as they are needed, and rows that cannot be decoded
            "skips",
            (
                *STREAM,
                f"data.path={SHARDS}/compressed",
                "data.on_error=skip",
                "checkpoint.every_n_steps=4",
                "checkpoint.async_save=true",
                "trainer.log_every_n_steps=3",
                "trainer.val_check_interval=4",
            ),
            interval=4,
            under_way=4,
            shards=True,
        ),
        Recipe(
            "mixture",
            (
                *MIXTURE,
                "checkpoint.every_n_epochs=1",
                "trainer.accumulate_grad_batches=2",
                "trainer.log_every_n_steps=1",
            ),
            interval=6,
            shards=True,
        ),
    )
}
PLAIN = tuple(name for name, recipe in RECIPES.items() if not recipe.shards)
ON_SHARDS = tuple(name for name, recipe in RECIPES.items() if recipe.shards)


@dataclass(frozen=True)
class Kind:
    """What can be done to a run.

    Attributes:
        text: in a person's words.
        places: where in a run it can be done. ``starting`` to ``ending`` are seen from outside; the others are places
            in a rank's own code (``parts.py``); ``between`` is after one start has ended and before the next one.
        ranks: the least number of ranks it makes sense for.
        restarts: whether a launcher that restarts ranks goes on after it by itself.
        modes: where there is such a thing.
    """

    text: str
    places: tuple[str, ...]
    ranks: int = 1
    restarts: bool = False
    modes: tuple[Mode, ...] = ("local", "torchrun")


OUTSIDE = ("starting", "training", "training", "training", "saving", "saving", "ending")
INSIDE = ("making", "forward", "forward", "forward", "validation", "validated", "step", "step", "saved")
IN_STEP = ("backward", "optimizer")  # drawn where ranks are replaced
BETWEEN = ("between",)

KINDS = {
    "kill_rank": Kind("SIGKILL of a rank", OUTSIDE, restarts=True),
    "kill_rank_0": Kind("SIGKILL of rank 0", OUTSIDE, restarts=True),
    "kill_launcher": Kind("SIGKILL of the launcher or agent", OUTSIDE),
    "kill_server": Kind("SIGKILL of the process that forked the ranks", OUTSIDE, 2, True, ("local",)),
    "stop_server": Kind("SIGSTOP of that process, then SIGKILL of a rank", OUTSIDE, 2, True, ("replace",)),
    "stop_agent": Kind("SIGSTOP of torchrun's agent, which has the store, for 5 s", OUTSIDE, 2, True, ("torchrun",)),
    "kill_two": Kind("SIGKILL of two ranks at once", OUTSIDE, 2, True, GOES_ON),
    "kill_node": Kind("SIGKILL of all that runs on a node, and of Slurm's daemon there", OUTSIDE, 2, True, ON_NODES),
    "return_node": Kind("the node comes back", ("returning",), 2, True, ON_NODES),
    "kill_all": Kind("SIGKILL of every process at once", OUTSIDE),
    "stop_rank": Kind("SIGSTOP of a rank", ("starting", "training", "training", "training", "saving"), 2, True),
    "kill_worker": Kind("SIGKILL of a data worker", ("training",), restarts=True),
    "interrupt": Kind("Ctrl-C", OUTSIDE),
    "interrupt_twice": Kind("Ctrl-C twice", OUTSIDE),
    "terminate": Kind("SIGTERM", OUTSIDE),
    "usr1": Kind("SIGUSR1", ("training", "training", "training", "saving", "ending")),
    "disk_full": Kind("the disk is full", ("training",)),
    "exception": Kind("an exception in a rank", INSIDE, restarts=True),
    "exit_0": Kind("os._exit(0) in a rank", INSIDE, 2, True),
    "exit_3": Kind("os._exit(3) in a rank", INSIDE, restarts=True),
    "segfault": Kind("a segmentation fault in a rank", INSIDE, restarts=True),
    "flip_byte": Kind("one byte of the newest checkpoint flipped", BETWEEN),
    "cut_short": Kind("the newest checkpoint cut short", BETWEEN),
    "delete": Kind("the newest checkpoint deleted", BETWEEN),
    "tear_events": Kind("the last event file torn", BETWEEN),
}


@dataclass(frozen=True)
class Fault:
    """One thing that is done.

    Attributes:
        kind, place: see ``KINDS``.
        step: not before this one is reached; 0 for what happens while ranks start.
        wait_s: how long after that, or after the start, for what is done from outside.
        share: of the ranks there are, or of the bytes of a file: which one; from 0 to below 1.
        pause_s: between the first and the second Ctrl-C.
    """

    kind: str
    place: str
    step: int
    wait_s: float
    share: float
    pause_s: float

    def rank(self, world_size: int) -> int:
        """Return the rank it is done to."""
        return 0 if self.kind == "kill_rank_0" else int(self.share * world_size)

    def __str__(self) -> str:
        return f"{self.kind} {self.place}" + (f" {self.step}" if self.step else "")


@dataclass(frozen=True)
class Script:
    """A run: what is done to it in turn, and how it is started.

    Attributes:
        world_sizes: of the first start, of the second one, and so on; as many as it may take.
        max_restarts: how often the launcher restarts failed ranks.
        timeout_s: ``launcher.timeout_s``.
    """

    mode: Mode
    seed: int
    number: int
    recipe: str
    faults: tuple[Fault, ...]
    world_sizes: tuple[int, ...]
    max_restarts: int
    timeout_s: int

    @property
    def goes_on(self) -> bool:
        """Whether one start goes on beyond whatever is lost."""
        return self.mode in GOES_ON

    @property
    def may_be_hurt(self) -> int:
        """How many ranks there always are: those of one node where the other one is lost."""
        return self.world_sizes[0] // (2 if any(fault.kind == "kill_node" for fault in self.faults) else 1)


def draw(
    seed: int,
    mode: Mode,
    number: int,
    most: int = 5,
    sizes: Sequence[int] = SIZES,
    without: Collection[str] = (),
    saves: bool = False,
    recipes: Sequence[str] = PLAIN,
) -> Script:
    """Return the script of a run.

    Args:
        most: faults, at most.
        sizes: world sizes to draw from.
        without: kinds of faults to leave out.
        saves: only what falls into a save or damages what is saved.
        recipes: to draw from.
    """
    if saves:
        without = {*without, *(name for name, kind in KINDS.items() if not {"saving", *BETWEEN} & {*kind.places})}
    dice = random.Random(f"{seed} {mode} {number}")
    recipe = RECIPES[dice.choice(recipes)]
    count = dice.randint(1, most) if most else 0
    max_restarts = dice.choice((0, 0, count))
    kinds: list[str] = []
    for _ in range(count):
        possible = _possible(recipe, mode, max_restarts > 0, kinds)
        kinds.append(dice.choice([kind for kind in possible if kind not in without]))
    steps = sorted(dice.sample(range(2, STEPS - 1), count))
    faults = tuple(_fault(kind, step, dice, saves) for kind, step in zip(kinds, steps, strict=True))
    least = max((KINDS[kind].ranks for kind in kinds), default=1)
    fitting = [size for size in sizes if size >= least]
    return Script(
        mode=mode,
        seed=seed,
        number=number,
        recipe=recipe.name,
        faults=faults,
        world_sizes=tuple(dice.choice(fitting) for _ in range(count + 4)),
        max_restarts=max_restarts,
        timeout_s=8 if "stop_rank" in kinds else 60,
    )


def _possible(recipe: Recipe, mode: Mode, restarts: bool, before: list[str]) -> list[str]:
    """Return the kinds that may come next: a file is damaged after something has ended the run."""
    ended = bool(before) and KINDS[before[-1]].places != BETWEEN and not restarts
    return [
        name
        for name, kind in KINDS.items()
        if mode in kind.modes
        and (kind.places != BETWEEN or ended)
        and (name != "kill_worker" or recipe.workers)
        and (name != "disk_full" or not restarts)
    ]


def _fault(kind: str, step: int, dice: random.Random, saves: bool) -> Fault:
    place = dice.choice([each for each in KINDS[kind].places if not saves or each in ("saving", *BETWEEN)])
    early, late = place in ("starting", "making"), place == "ending"
    return Fault(
        kind=kind,
        place=place,
        step=0 if early or place == "between" else STEPS if late else step,
        wait_s=round(dice.uniform(0, 4 if early else 0.6 if late else 0.04), 4),
        share=round(dice.random(), 6),
        pause_s=round(dice.uniform(0.05, 1), 3),
    )
