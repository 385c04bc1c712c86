"""A model that takes part in collectives: where not all ranks can, it is refused by name, and nobody waits."""

from collections.abc import Callable

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each

Run = Callable[..., Summary]

CONTRAST = ("model._target_=own_parts.Contrast", "data.global_batch_size=12", "data.num_samples=48")
EVEN, UNEVEN = "data.val_samples=24", "data.val_samples=21"


@pytest.mark.parametrize("strategy", quick_each(2, ["strategy=ddp", "strategy=fsdp strategy.wrap=['2']"]))
def test_ranks_with_equal_batches_gather_in_a_model(strategy: str, run: Run) -> None:
    assert run(*CONTRAST, *strategy.split(), EVEN, "data.val_batch_size=6", world_size=2)["status"] == "finished"


@pytest.mark.parametrize("strategy", ["strategy=ddp", "strategy=fsdp strategy.wrap=['2']"])
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (
            [UNEVEN, "data.val_batch_size=12"],
            r"batch 0 of val some ranks have 11 samples and others 10\. .*val_batch_size",
        ),
        (
            [EVEN, "data.val_batch_size=6", "data.num_samples=45"],
            "batch 3 of train some ranks have 5 samples and others 4",
        ),
    ],
)
def test_rows_of_unequal_batches_are_not_gathered(strategy: str, own: list[str], expected: str, run: Run) -> None:
    with pytest.raises(Exception, match=rf"A step calls c10d::\w+ with the \d+ rows of a batch, and of {expected}"):
        run(*CONTRAST, *strategy.split(), *own, world_size=2)


@pytest.mark.parametrize(
    ("strategy", "ranks", "reason"),
    quick_each(
        2,
        [
            ("strategy=ddp_exact strategy.shards=6", 2, "promises the same bits on any number of ranks"),
            ("strategy=parameter_server", 3, "runs the model on 2 of 3 ranks"),
            ("strategy=ddp_pipeline", 2, "has each of them run another part of the model"),
        ],
    ),
)
def test_no_collective_goes_with_some_strategies(strategy: str, ranks: int, reason: str, run: Run) -> None:
    with pytest.raises(Exception, match=f"calls c10d::allgather_, in which all ranks have to take part, .* {reason}"):
        run(*CONTRAST, *strategy.split(), EVEN, world_size=ranks)


@pytest.mark.parametrize(
    ("strategy", "ranks", "reason"),
    quick_each(
        3,
        [
            ("strategy=ddp_exact", 2, "promises the same bits on any number of ranks"),
            ("strategy=fsdp strategy.shards=4 strategy.wrap=[net1,net2]", 2, "promises the same bits"),
            ("strategy=parameter_server", 3, "runs the model on 2 of 3 ranks"),
        ],
    ),
)
def test_nor_one_in_a_loss(strategy: str, ranks: int, reason: str, run: Run) -> None:
    with pytest.raises(Exception, match=f"calls c10d::allreduce_, in which all ranks have to take part, .* {reason}"):
        run("task.loss._target_=own_parts.OverRanks", "data.num_samples=48", *strategy.split(), world_size=ranks)
