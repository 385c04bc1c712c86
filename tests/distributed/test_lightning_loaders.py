"""Several loaders to train on: one batch of each in a step, as Lightning has it, at any world size."""

from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch

from ddp_recipes import RequestError
from ddp_recipes.data.combined import CombinedPlan, Together, combined
from ddp_recipes.data.order import BatchPlan, Sequential, Shuffled
from helpers.marks import at_night
from helpers.ranks import run_recipe

SIZES, BATCHES = (16, 20, 6), (4, 2, 1)
TRAINED = [
    *(
        "task=lightning",
        "data=lightning",
        "model=toy",
        "model._target_=lightning_loaders.Joined",
        "trainer.max_epochs=2",
    ),
    *("trainer.limit_val_batches=0", "trainer.progress=false", "logger=none", "launcher.device=cpu"),
    *("strategy=ddp_exact", "strategy.shards=2"),
]


def plan_of(shards: int, shuffle: bool = True, shortest: bool = False) -> CombinedPlan:
    orders = [Shuffled(size, 42) if shuffle else Sequential(size) for size in SIZES]
    plans = {
        str(size): BatchPlan(order, batch * 2, shards, 42)
        for order, size, batch in zip(orders, SIZES, BATCHES, strict=True)
    }
    return combined(plans, Together([range(size) for size in SIZES]), shortest)


def test_an_epoch_goes_once_through_the_longest_and_again_through_the_others() -> None:
    plan, alone = plan_of(2), plan_of(1)
    assert [plan.size(batch) for batch in range(5)] == [14] * 5
    assert (plan.num_batches, plan.num_samples, plan.size(5), plan_of(1, shortest=True).num_batches) == (5, 70, 0, 2)
    for epoch in range(3):
        both = [[plan.indices(epoch, batch, shard).tolist() for shard in range(2)] for batch in range(5)]
        assert [sorted(chain(*shards)) for shards in both] == [
            sorted(alone.indices(epoch, n).tolist()) for n in range(5)
        ]
        assert all(len(shard) == 7 for shards in both for shard in shards)
        counts = Counter(chain.from_iterable(chain.from_iterable(both)))
        assert {counts[sample] for sample in range(16, 36)} == {1}, "the longest: each sample once"
        assert {counts[sample] for sample in range(16)} == {2, 3}, "two batches, two anew, and one anew"
        places = [plan.positions(batch, shard).tolist() for batch in range(5) for shard in range(2)]
        assert sorted(chain(*places)) == list(range(70))
    of_others = [[n - 36 for n in alone.indices(0, batch).tolist() if n >= 36] for batch in range(5)]
    assert sorted(chain(*of_others[:3])) == list(range(6)), "each time it begins anew each sample comes once"
    assert of_others[:2] != of_others[3:], "in another order"
    assert plan_of(1, shuffle=False).indices(7, 3).tolist() == [*range(8, 16), *range(28, 32), 36, 37]
    assert torch.equal(plan.limited(3).indices(1, 2, 1), plan.indices(1, 2, 1))


def test_sets_of_one_length_are_not_shuffled_alike() -> None:
    plans = {name: BatchPlan(Shuffled(64, 1), 64, 1, 1) for name in ("one", "other")}
    indices = combined(plans, Together([range(64)] * 2), False).indices(0, 0)
    assert not torch.equal(indices[:64], indices[64:] - 64)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("Joined", []), ("Numbered", []), *at_night(("Joined", ["strategy=fsdp", "strategy.wrap=[net1,net2]"]))],
)
def test_they_are_trained_on_alike_at_any_world_size_and_resumed(
    model: str, strategy: list[str], tmp_path: Path
) -> None:
    own = [*TRAINED, f"model._target_=lightning_loaders.{model}"]
    own += ["checkpoint.every_n_steps=1", "checkpoint.save_top_k=-1"]
    whole = run_recipe(own, 1, tmp_path / "whole")
    assert whole["global_step"] == 10
    two = run_recipe([*own, *strategy, "+model.workers=1"], 2, tmp_path / "two")
    (middle,) = (tmp_path / "two" / "checkpoints").glob("step_00000007.*")
    again = run_recipe([*own, f"ckpt_path={middle}"], 1, tmp_path / "again")
    assert two["weights_sha256"] == again["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        (
            "Streamed",
            [],
            "loader 2 of 2 to train on, a DataLoader of Stream, has batches that are not known beforehand",
        ),
        ("Batched", [], "loader 2 of 2 to train on, a DataLoader of Noisy, has batches that are not known"),
        ("Uneven", [], "loader 2 of 2 has 5 samples in batches of 4 over 2 shards, each of which needs a sample"),
        (
            "Nested",
            [],
            "loader 2 of 2 to train on, a CombinedLoader of Together, has batches .* put together themselves",
        ),
        ("Without", [], "train_dataloader returns an empty dict"),
        ("Joined", ["plan=true"], "cut batches anew: .* train on one loader"),
        ("Joined", ["data.global_batch_size=6"], "loader 3 of 3, with batches of 1, would get no whole"),
    ],
)
def test_what_cannot_come_together_is_refused(model: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        run_recipe([*TRAINED, f"model._target_=lightning_loaders.{model}", *overrides], 1, tmp_path)
