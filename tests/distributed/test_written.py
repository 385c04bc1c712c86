"""What a forward pass writes to parameters is the same under each strategy, or refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.errors import RunFailed
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import quick_each, slow_but

Run = Callable[..., Summary]

COUNTED = "model._target_=own_parts.Counted"
TEACHER = "model._target_=own_parts.Teacher"
BOUNDED = "model._target_=own_parts.Bounded"
MOMENTUM, POLYAK = "model._target_=own_parts.Momentum", "model._target_=own_parts.Polyak"
FOLLOWED = "model._target_=own_parts.Followed"


@pytest.mark.parametrize("model", [COUNTED, TEACHER])
def test_ranks_that_write_alike_are_as_one_process(model: str, run: Run) -> None:
    alone, two = (run(model, "strategy=ddp", "data.global_batch_size=16", world_size=size) for size in (1, 2))

    assert two["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "model", "name"),
    quick_each(
        4,
        [
            ("strategy=ddp_exact strategy.shards=4", COUNTED, "1.mean"),
            ("strategy=ddp_exact strategy.shards=4", TEACHER, "teacher.weight"),
            ("strategy=ddp_pipeline", COUNTED, "1.mean"),
            ("strategy=ddp model.num_devices=2 model.micro_batches=3", COUNTED, "1.mean"),
            ("strategy=parameter_server", FOLLOWED, "seen"),
            ("strategy=fsdp", COUNTED, "mean"),
            ("strategy=fsdp strategy.shards=4 strategy.wrap=[student,teacher]", TEACHER, "teacher.weight"),
            ("strategy=fsdp strategy.shards=4 strategy.wrap=[student,teacher]", MOMENTUM, "teacher.weight"),
            ("strategy=fsdp strategy.shards=4 strategy.wrap=[student,teacher]", POLYAK, "teacher.weight"),
        ],
    ),
)
def test_what_would_be_lost_or_done_twice_is_refused(strategy: str, model: str, name: str, run: Run) -> None:
    with pytest.raises(Exception, match=f"writes to the parameter {name}"):
        run(*strategy.split(), model, world_size=2)


@pytest.mark.parametrize(("model", "name"), quick_each(2, [(BOUNDED, "table.weight"), (FOLLOWED, "seen")]))
@pytest.mark.parametrize(
    "own", quick_each(3, [[], ["trainer.check_val_every_n_epoch=9"], ["strategy.shared_memory=false"]])
)
def test_what_each_rank_writes_otherwise_is_refused(own: list[str], model: str, name: str, run: Run) -> None:
    with pytest.raises(Exception, match=f"The parameter {name} has other values on rank 1, 2 than on rank 0"):
        run("strategy=ddp", model, *own, world_size=3)


@pytest.mark.slow
def test_one_process_bounds_vectors(run: Run) -> None:
    assert run("strategy=ddp", BOUNDED)["weights_sha256"] == run("strategy=single", BOUNDED)["weights_sha256"]


WRITTEN_BY = [
    "strategy=ddp_exact strategy.shards=4",
    "strategy=ddp_pipeline",
    "strategy=ddp model.num_devices=2 model.micro_batches=3",
    "strategy=parameter_server",
    "strategy=fsdp strategy.wrap=['2']",
]


@pytest.mark.parametrize("kind", slow_but(["Constrained"], ["Constrained", "Clamped"]))
@pytest.mark.parametrize("strategy", slow_but(WRITTEN_BY[:1], WRITTEN_BY))
def test_what_goes_by_data_is_seen_as_well(strategy: str, kind: str, run: Run) -> None:
    own = "model._target_=own_parts.Within", f"+model.kind={kind}"
    assert run("strategy=ddp", *own, world_size=2)["status"] == "finished"
    with pytest.raises(Exception, match=r"writes to the parameter (2\.)?weight"):
        run(*strategy.split(), *own, world_size=2)


@pytest.mark.parametrize("model", quick_each(2, [TEACHER, MOMENTUM, POLYAK]))
def test_fsdp_keeps_what_a_pass_writes_to_rows(model: str, run: Run) -> None:
    both = "data.global_batch_size=16", model
    wanted = run(*both, "strategy=ddp", world_size=2)
    found = run(*both, "strategy=fsdp", "strategy.wrap=[student,teacher]", world_size=2)

    assert found["metrics"]["val/loss"] == pytest.approx(wanted["metrics"]["val/loss"], rel=1e-6)


def test_a_constructor_that_fails_on_one_rank_is_named(run: Run, tmp_path: Path) -> None:
    flaky = "model._target_=own_parts.Flaky", f"+model.mark={tmp_path / 'mark'}"

    with pytest.raises(RunFailed, match=r"Rank [01] failed while it got ready, .*LookupError: the cat is not there"):
        run("strategy=fsdp", "strategy.wrap=[net1]", *flaky, world_size=2)


def test_a_schedule_does_not_warn_of_a_step_that_a_scaler_skipped(run: Run) -> None:
    run("trainer.precision=16-mixed", "model._target_=exact_parts.Steep", "scheduler=cosine")
