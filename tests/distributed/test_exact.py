"""``strategy=ddp_exact``: the same bits on any number of ranks, for a price."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Store
from torch.profiler import ProfilerActivity, profile

from ddp_recipes import rank
from ddp_recipes.config.request import Request
from ddp_recipes.devices import of_gpus
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import DDPExact, DDPExactSettings
from ddp_recipes.testing import make_job, on_ranks
from helpers.exact import QUIET, RECIPES, all_on_ranks
from helpers.marks import slow_but

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

SIZES = (1, 2, 3, 4, 6, 12)
SOME_OR_ALL = [pytest.param((1, 3), id="some sizes"), pytest.param(SIZES, id="all sizes", marks=pytest.mark.nightly)]
BASE = ["strategy=ddp_exact", *QUIET]
SAVING = [*BASE, "checkpoint=default"]


@pytest.fixture(scope="module", params=SOME_OR_ALL)
def summaries(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, Summary]]:
    """What each recipe left at each world size."""
    folder = tmp_path_factory.mktemp("exact")
    jobs = {name: make_job([*BASE, *RECIPES[name]]) for name in RECIPES}
    found: dict[str, dict[int, Summary]] = {name: {} for name in RECIPES}
    for size in request.param:
        here = {name: replace(job, directory=folder / f"{name[:4]}_{size}") for name, job in jobs.items()}
        for name, summary in all_on_ranks(here, size).items():
            found[name][size] = summary
    return found


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.slow
def test_any_number_of_ranks_gives_the_same_bits(name: str, summaries: dict[str, dict[int, Summary]]) -> None:
    alone = summaries[name][1]
    measured = {"train/loss", "train/lr", "train/grad_norm", "train/epoch", "val/loss", "val/mae"}
    for size, summary in summaries[name].items():
        assert summary["world_size"] == size
        assert summary["weights_sha256"] == alone["weights_sha256"], f"{size} ranks"
        for metric in measured:
            assert summary["metrics"][metric] == alone["metrics"][metric], f"{metric} on {size} ranks"
        for count in ("global_step", "epoch", "samples_seen"):
            assert summary[count] == alone[count]


def test_what_no_shard_uses_has_no_gradient_on_any_number_of_ranks(run: Run, weights: Weights) -> None:
    spare = ("strategy=ddp_exact", "model._target_=own_parts.Spare", "trainer.max_epochs=1", "optimizer.weight_decay=")
    one, two, without = (
        weights(run(*spare[:-1], f"{spare[-1]}{decay}", world_size=size))
        for size, decay in ((1, 0.1), (2, 0.1), (1, 0.0))
    )
    for name in ("spare.weight", "spare.bias"):
        assert torch.equal(one[name], without[name])
        assert torch.equal(two[name], without[name]), "it has decayed, as with a gradient of 0"
    assert not torch.equal(one["net1.weight"], without["net1.weight"])


@pytest.mark.slow
def test_recipes_are_what_they_say(summaries: dict[str, dict[int, Summary]]) -> None:
    """Otherwise equal bits would prove nothing."""
    alone = {name: found[1] for name, found in summaries.items()}
    assert len({summary["weights_sha256"] for summary in alone.values()}) == len(alone)
    stopped = alone["random transform, workers, early stopping"]
    assert 1 < stopped["epoch"] < 12
    assert stopped["samples_seen"] == 48 * stopped["epoch"]


@pytest.mark.slow
def test_a_run_goes_on_at_any_other_world_size(tmp_path: Path, run: Run) -> None:
    overrides = [
        *SAVING,
        "data.num_samples=89",
        "data.train._target_=own_parts.OneByOne",
        "model._target_=own_parts.Dropout",
        "optimizer=adamw",
        "scheduler=cosine",
        "scheduler.T_max=12",
        "trainer.max_epochs=3",
        "ckpt_path=auto",
    ]
    whole = run(*overrides)
    assert (whole["global_step"], whole["epoch"]) == (12, 3)
    for size, steps in [(1, 2), (2, 3), (3, 5), (4, 7), (6, 10), (12, 12)]:
        limit = f"trainer.max_steps={steps}"
        moved = run(*overrides, limit, world_size=size, directory=tmp_path / "moved")
        assert (moved["world_size"], moved["global_step"]) == (size, steps)
    assert moved["weights_sha256"] == whole["weights_sha256"]
    assert moved["samples_seen"] == whole["samples_seen"] == 3 * 89
    assert moved["metrics"]["val/loss"] == whole["metrics"]["val/loss"]


# --- the right numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_it_learns_what_one_process_learns(world_size: int, run: Run, weights: Weights) -> None:
    learning = [
        *SAVING,
        "data.num_samples=61",
        "data.global_batch_size=24",
        "model._target_=own_parts.Spare",
        "trainer.accumulate_grad_batches=2",
    ]
    single = run(*learning, "strategy=single")
    exact = run(*learning, world_size=world_size)
    torch.testing.assert_close(weights(exact), weights(single), rtol=0, atol=1e-6)
    assert exact["samples_seen"] == single["samples_seen"]
    for metric in ("train/loss", "train/grad_norm", "val/loss", "val/mae"):
        assert exact["metrics"][metric] == pytest.approx(single["metrics"][metric], rel=1e-5)


def test_buffers_are_combined_by_the_rule(run: Run, weights: Weights) -> None:
    """One step from zero: floats are the mean over all samples, counts those of one part, constants stay."""
    one_batch = ["data.num_samples=29", "data.global_batch_size=29", "trainer.max_epochs=1", "optimizer.lr=0"]
    learning = [*SAVING, *one_batch, "model._target_=exact_parts.Keeping"]
    whole = weights(run(*learning, "strategy=single"))
    for world_size in (1, 2):
        parts = weights(run(*learning, world_size=world_size))
        torch.testing.assert_close(parts["mean"], whole["mean"], rtol=0, atol=1e-6)
        assert parts["batches"] == 1
        assert torch.equal(parts["mask"], torch.full((2, 2), float("-inf")).triu(1))
        assert torch.equal(parts["tenth"], torch.tensor(0.1))


def test_an_optimizer_that_draws_draws_the_same_on_any_number_of_ranks(run: Run) -> None:
    drawing = [*BASE, "optimizer._target_=exact_parts.Noisy"]
    found = {size: run(*drawing, world_size=size)["weights_sha256"] for size in (1, 3)}
    assert found[1] == found[3]
    assert found[1] != run(*BASE)["weights_sha256"]
    saving = [*QUIET, "strategy=ddp", "optimizer._target_=exact_parts.Noisy"]
    assert run(*saving, world_size=2)["status"] == "finished", "DDP compares what ranks have before each validation"


@pytest.mark.parametrize("put_back", [False, True])
def test_a_model_that_seeds_torch_is_told_once(put_back: bool, run: Run) -> None:
    summary = run(*BASE, "model._target_=exact_parts.Seeding", f"+model.put_back={put_back}", world_size=2)
    log = (Path(summary["run_directory"]) / "train.log").read_text()
    assert log.count("A step seeds torch by itself (torch.seed, torch.manual_seed)") == (not put_back)


FIRST = ["strategy.shards=12", "model._target_=exact_parts.FromFirst"]
BOTH = pytest.mark.parametrize("strategy", [["strategy=ddp_exact"], ["strategy=fsdp", "strategy.wrap=[net1,net2]"]])


@BOTH
def test_what_an_evaluation_moves_is_put_back_and_named(strategy: list[str], run: Run) -> None:
    """The trial before training is the first that the model sees, and each rank has other samples in it."""
    found = [run(*QUIET, *strategy, *FIRST, world_size=size) for size in (1, 3)]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]
    log = (Path(found[1]["run_directory"]) / "train.log").read_text()
    assert log.count("The validation has moved the buffers evaluated.") == 1


@BOTH
def test_an_evaluation_that_writes_to_a_parameter_ends_the_run_by_name(strategy: list[str], run: Run) -> None:
    with pytest.raises(RunFailed, match="A forward pass writes to the parameter scale"):
        run(*QUIET, *strategy, *FIRST, "+model.writes=true", world_size=2)


def test_predictions_do_not_depend_on_the_number_of_ranks(run: Run, tmp_path: Path) -> None:
    trained = run(*SAVING, "data.num_samples=24", "trainer.max_epochs=1")["last_checkpoint"]
    predicted = []
    for size in (1, 3):
        folder = tmp_path / f"predicted_{size}"
        run(*BASE, "mode=predict", f"ckpt_path={trained}", world_size=size, directory=folder)
        predicted.append(torch.load(folder / "predictions.pt", weights_only=True))
    assert predicted[0].shape == (21, 5)
    assert torch.equal(*predicted)


# --- the price -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", slow_but([], [2, 4]))
def test_traffic_is_as_promised(world_size: int) -> None:
    """A rank sends at most shards / ranks + 1 gradients a step, counted in what it hands to collectives."""
    steps = 6
    model = ["model=mlp", f"data.num_samples={24 * steps}", "trainer.max_epochs=1", "data.val=null"]
    job = make_job([*BASE, *model, "trainer.log_every_n_steps=1000"])

    def sent(world: World, store: Store | None) -> tuple[float, int]:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            summary = rank.run(job, world, Messages(store, private=True))
        assert summary["global_step"] == steps
        shapes = [
            (event.name, torch.Size(event.input_shapes[0]).numel())
            for event in profiler.events()
            if event.name.startswith("gloo:") and event.input_shapes  # a barrier has none
        ]
        kept = {"gloo:all_to_all": 1 / world_size}
        total = 0.0
        for name, numel in shapes:
            total += numel * (1 - kept[name]) if name in kept else numel * (world_size - 1)
        return total, sum(name == "gloo:all_to_all" for name, _ in shapes)

    gradient = 10 * 64 + 64 + 64 * 32 + 32 + 32 * 5 + 5
    for total, messages in on_ranks(sent, world_size):
        assert messages == steps, "small gradients go together"
        assert total / steps <= (12 / world_size + 1) * gradient * 1.05
        assert total / steps >= 12 / world_size * (world_size - 1) / world_size * gradient


@pytest.mark.slow
def test_large_gradients_go_one_part_at_a_time_and_give_the_same_bits(run: Run) -> None:
    overrides = [*BASE, "model=mlp", "model.hidden_features=[1100,1000]", "data.num_samples=24", "trainer.max_epochs=1"]
    assert run(*overrides)["weights_sha256"] == run(*overrides, world_size=2)["weights_sha256"]


def test_a_resume_with_other_shards_is_refused_unless_asked_for(run: Run) -> None:
    saving = [*BASE, "checkpoint=default", "data.global_batch_size=24"]
    path = run(*saving, "trainer.max_steps=2", world_size=2)["last_checkpoint"]
    other = [*saving, "strategy.shards=6", "trainer.max_steps=3", f"ckpt_path={path}"]
    with pytest.raises(RequestError, match=r"trained in 12 shards, this run has 6: .* Set strategy\.shards=12"):
        run(*other, world_size=2)
    assert run(*other, "resume.strict=false", world_size=2)["global_step"] == 3


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        ([], 5, "strategy.shards=12 cannot be dealt evenly to 5 processes. Use 1, 2, 3, 4, 6, 12 processes"),
        (["strategy.shards=4"], 3, "strategy.shards=4 cannot be dealt evenly to 3 processes. Use 1, 2, 4 processes"),
        (["strategy.shards=0"], 1, "strategy.shards=0 is not allowed. Allowed: a whole number at least 1."),
        (["strategy.shards=1.5"], 1, "strategy.shards=1.5 is not allowed"),
        (["data.global_batch_size=8"], 2, "less than one sample for each of 12 replicas. Use at least 12, or fewer"),
        (["model._target_=exact_parts.Sparse"], 1, "adds dense gradients, but those of model.words are sparse"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused(
    overrides: list[str], world_size: int, message: str, run: Run, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as refusal:
        run(*BASE, *overrides, world_size=world_size, directory=tmp_path / "refused")
    assert message in str(refusal.value)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(("gpus", "asked"), [(5, "auto"), (0, "8")])
def test_the_launcher_refuses_it_before_it_starts_anything(gpus: int, asked: str) -> None:
    request = Request.of(make_job([*BASE, "launcher.device=auto", f"launcher.nproc_per_node={asked}"]).config)
    with pytest.raises(RequestError, match="Use 1, 2, 3, 4, 6, 12 processes"):
        request.processes(of_gpus(gpus))


def test_the_number_of_threads_is_set() -> None:
    def threads(world: World, store: Store | None) -> int:
        strategy = DDPExact(DDPExactSettings(num_threads=2))
        strategy.setup(world, None if store is None else Messages(store), "gloo", timedelta(seconds=60), None)
        strategy.teardown()
        return torch.get_num_threads()

    assert on_ranks(threads, 1) == [2]
