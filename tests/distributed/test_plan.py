"""``plan=true``: what a plan says before is what a run says after, and nothing is trained."""

import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed import Store

from ddp_recipes import rank
from ddp_recipes.build.recipe import make_recipe
from ddp_recipes.build.run import join, make_run, make_stop_controller
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.data import loader as data
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.control import Control
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import make_job, on_ranks
from ddp_recipes.tools.dry_run.backward import backward, roots_of
from ddp_recipes.tools.dry_run.memory import MemoryTracker
from ddp_recipes.training.metrics import evaluate
from ddp_recipes.training.state import Run as TrainingRun
from ddp_recipes.training.update import forward_backward
from helpers.marks import quick_each, slow_but
from helpers.processes import until
from helpers.recipes import OF_KIND

Run = Callable[..., Summary]
Plan = Callable[..., dict[str, Any]]

QUICK = [
    "data=random",
    "data.num_samples=61",
    "data.val_samples=21",
    "data.batch_size=8",
    "model=toy",
    "trainer.max_epochs=2",
    "trainer.progress=false",
    "logger=none",
]
IMAGES = ["data=fake_images", "data.num_samples=16", "data.val_samples=4", "data.image_size=32", "data.batch_size=4"]
MANY = [*IMAGES, "data.num_samples=64", "model=resnet18"]
GPUS = ["plan.nnodes=2", "plan.gpus_per_node=8"]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Plan with these overrides, and return what is in ``plan.json``."""

    def planned(*overrides: str) -> dict[str, Any]:
        folder = tmp_path / f"plan_{len(list(tmp_path.iterdir()))}"
        job = make_job([*QUICK, "plan=true", *overrides], folder)

        def run(world: World, store: Store | None) -> Summary:
            return rank.run(job, world, store)

        (summary,) = on_ranks(run, 1)
        assert summary["status"] == "finished"
        found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        return found

    return planned


def kinds(planned: dict[str, Any]) -> list[str]:
    return [finding["kind"] for finding in planned["findings"]]


def message(planned: dict[str, Any], kind: str) -> str:
    (found,) = [finding["message"] for finding in planned["findings"] if finding["kind"] == kind]
    return str(found)


# --- what a run says after -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "weights"), [(["strategy=ddp"], 660), (["strategy=fsdp", "strategy.wrap=[net1,net2]"], 352)]
)
def test_a_lightning_module_is_planned_without_its_data(
    strategy: list[str], weights: int, plan: Plan, run: Callable[..., Summary]
) -> None:
    own = "model._target_=own_parts.Lit", "task=lightning"
    planned, trained = plan(*own, "launcher.nproc_per_node=2", *strategy), run(*own)
    assert (planned["steps"], planned["samples_seen"]) == (8, 122)
    assert [each["weights"] for each in planned["memory"]] == [weights]
    # Names of metrics that the module logs nobody knows; what it repeats for Lightning takes no more room.
    assert planned["checkpoint_bytes"] == pytest.approx(Path(trained["last_checkpoint"]).stat().st_size, rel=0.05)


COUNTED = [
    (["strategy=single"], 1),
    (["strategy=ddp"], 2),
    (["strategy=ddp", "data.drop_last=true", "trainer.max_epochs=3"], 3),
    (["strategy=ddp", "trainer.accumulate_grad_batches=2", "trainer.max_steps=3"], 2),
    (["strategy=ddp", "data.global_batch_size=10", "trainer.max_steps=5", "trainer.limit_train_batches=3"], 3),
    (["strategy=ddp_exact", "data.batch_size=2"], 2),
]


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    slow_but([COUNTED[4]], COUNTED, [COUNTED[3]]),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_counts_are_those_of_the_run(overrides: list[str], world_size: int, plan: Plan, run: Run) -> None:
    planned = plan(*overrides, f"launcher.nproc_per_node={world_size}", "launcher.device=cpu")
    summary = run(*QUICK, *overrides, "launcher.device=cpu", world_size=world_size)
    assert planned["steps"] == summary["global_step"]
    assert planned["samples_seen"] == summary["samples_seen"]
    assert planned["world_size"] == summary["world_size"]
    assert planned["samples_an_epoch"] + planned["samples_dropped_an_epoch"] == planned["samples"] == 61
    assert sum(each["samples_an_epoch"] for each in planned["ranks"]) == planned["samples_an_epoch"]
    state = load(Path(summary["last_checkpoint"]))
    assert planned["global_batch_size"] == state["global_batch_size"]


@pytest.mark.parametrize(
    "overrides",
    quick_each(
        4,
        [
            ["model=mlp", "optimizer=adamw", "trainer.precision=16-mixed"],
            ["optimizer=sgd"],
            ["model=mlp", "optimizer=adamw", "trainer.precision=bf16-true"],
            [*IMAGES, "model=resnet18", "trainer.max_steps=1"],
        ],
    ),
    ids=lambda value: " ".join(value),
)
def test_weights_optimizer_and_checkpoint_are_those_of_the_run(overrides: list[str], plan: Plan, run: Run) -> None:
    planned = plan(*overrides, "strategy=single", "launcher.device=cpu")
    summary = run(*QUICK, *overrides, "strategy=single", "launcher.device=cpu")
    path = Path(summary["last_checkpoint"])
    state = load(path)
    (memory,) = planned["memory"]
    assert memory["weights"] == bytes_in(state["model"])
    assert memory["optimizer"] == bytes_in(state["optimizer"]["state"])
    # Within 1 %, or one place: what is in the file begins at multiples of 64 bytes.
    assert planned["checkpoint_bytes"] == pytest.approx(path.stat().st_size, rel=0.01, abs=64)


def bytes_in(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(map(bytes_in, state.values())) if isinstance(state, dict) else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.accumulate_grad_batches=2"],
        ["trainer.accumulate_grad_batches=2", "strategy.static_graph=true"],
        ["model._target_=own_parts.Spare", "strategy.find_unused_parameters=true"],
    ],
    ids=lambda value: " ".join(value),
)
def test_bytes_all_reduced_are_those_of_the_run(overrides: list[str], plan: Plan, run: Run, tmp_path: Path) -> None:
    overrides = [*overrides, "data.num_samples=64", "launcher.device=cpu"]
    counting = ["strategy._target_=plan_parts.Counting", f"+strategy.folder={tmp_path}"]
    planned = plan(*overrides, "launcher.nproc_per_node=2")
    summary = run(*QUICK, *overrides, *counting, world_size=2)
    sent = json.loads((tmp_path / "all_reduced.json").read_text())
    assert planned["exchange"]["all_reduced_bytes"] * summary["global_step"] == sent > 0


@pytest.mark.parametrize(
    "overrides",
    quick_each(
        3,
        [
            ["model._target_=plan_parts.Residual"],
            ["model=mlp"],
            [*IMAGES, "model=resnet18", "trainer.max_steps=1"],
        ],
    ),
    ids=lambda value: " ".join(value),
)
def test_activations_are_those_that_autograd_keeps(overrides: list[str], plan: Plan, run: Run, tmp_path: Path) -> None:
    overrides = [*overrides, "strategy=single", "launcher.device=cpu"]
    (memory,) = plan(*overrides)["memory"]
    run(*QUICK, *overrides, "strategy._target_=plan_parts.Observed", f"+strategy.folder={tmp_path}")
    assert {name: memory[name] for name in ("activations", "batch")} == json.loads(
        (tmp_path / "observed.json").read_text()
    )


def test_the_backward_pass_on_paper_gives_the_gradients_of_autograd() -> None:
    """On real tensors, which it can be run on as well: from a loss, and from an output and what is made of it."""

    def gradients(_: World, __: Store | None) -> list[list[Any]]:
        from plan_parts import Residual

        torch.manual_seed(0)
        model, inputs = Residual(6, 5, 4), torch.randn(3, 6, requires_grad=True)
        leaves = [*model.parameters(), inputs]

        def taken() -> list[Any]:
            found = [leaf.grad.tolist() for leaf in leaves if leaf.grad is not None]
            for leaf in leaves:
                leaf.grad = None
            return found

        def take(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

        def two() -> list[torch.Tensor]:
            output = model(inputs)
            return [output, output.square()]

        given = [torch.randn(3, 4), torch.randn(3, 4)]
        model(inputs).square().mean().backward()
        found = [taken()]
        torch.autograd.backward(two(), given)
        found.append(taken())
        with torch.enable_grad():
            roots = roots_of(model(inputs).square().mean())
            more = [(get_gradient_edge(output), gradient) for output, gradient in zip(two(), given, strict=True)]
        for each in (roots, more):
            with torch.no_grad():
                backward(each, take)
            found.append(taken())
        return found

    expected, expected_of_two, found, found_of_two = on_ranks(gradients, 1)[0]
    assert len(expected) == len(expected_of_two) == 6
    for one, other in zip([*found, *found_of_two], [*expected, *expected_of_two], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


@pytest.fixture
def one_batch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing fetched ahead, which a plan leaves out."""
    monkeypatch.setattr(data, "_may_prefetch", lambda dataset: False)


@pytest.mark.parametrize(
    "overrides",
    quick_each(
        4,
        [
            ["model._target_=plan_parts.Recomputed", "data.in_features=300"],
            ["model._target_=plan_parts.Residual", "optimizer=adamw", "data.in_features=300"],
            ["model=mlp", "trainer.precision=bf16-mixed", "data.in_features=300"],
            [*IMAGES, "model=resnet18"],
        ],
    ),
    ids=lambda value: " ".join(value),
)
def test_a_step_takes_what_a_real_one_takes(overrides: list[str], plan: Plan, one_batch_at_once: None) -> None:
    """At most at a time, counted in the same way; autograd's own engine runs backward, indices are small."""
    size = ["data.num_samples=128", "data.batch_size=64"]
    overrides = [*overrides, *size, "strategy=single", "launcher.device=cpu", "data.val=null"]
    (memory,) = plan(*overrides)["memory"]

    def real(world: World, __: Store | None) -> int:
        recipe = make_recipe(make_job([*QUICK, *overrides]), world, Control(world, None, 60))
        run, tracker = make_run(recipe, make_stop_controller(recipe)), MemoryTracker(rounded=1)
        tracker.add((*run.task.parameters(), *run.task.buffers()))
        batches = run.train.batches(0)
        with tracker:
            for _ in range(2):
                forward_backward(run, batches)
                run.optimizer.step()
                run.optimizer.zero_grad()
        return tracker.peak[torch.device("cpu")]

    assert memory["training"] == pytest.approx(on_ranks(real, 1)[0], rel=0.02)


# --- pipelines -------------------------------------------------------------------------------------------------------

PIPELINE = ["strategy=ddp_pipeline", "launcher.device=cpu"]
DEEP = ["model=mlp", "model.hidden_features=[64,64,64,64,64]", "data.in_features=300"]
INTERLEAVED = ["strategy.stages=4", "strategy.schedule=interleaved_1f1b"]
PIPELINES = [
    (["strategy.micro_batches=8"], 2),
    (["strategy.schedule=gpipe", "optimizer=adamw"], 4),
    ([*INTERLEAVED, "strategy.micro_batches=4"], 2),
    (["strategy.stages=3", "trainer.accumulate_grad_batches=2", "trainer.precision=bf16-mixed"], 3),
    (["model._target_=own_chains.Frozen", "~model.hidden_features", "model.split=[5]"], 4),
]


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    slow_but([PIPELINES[0]], PIPELINES, daily=[PIPELINES[3]]),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_pipeline_does_and_holds_what_its_plan_says(
    overrides: list[str], world_size: int, plan: Plan, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each process: 64 samples are four batches for one replica, and two for two."""
    overrides = [*DEEP, *overrides, *PIPELINE, "data.num_samples=64", "data.batch_size=16"]
    planned = plan(*overrides, f"launcher.nproc_per_node={world_size}")
    monkeypatch.setenv("NOTES", str(tmp_path))
    summary = run(*QUICK, *overrides, "strategy._target_=plan_parts.CountingPipeline", world_size=world_size)
    assert planned["steps"] == summary["global_step"]
    assert planned["samples_seen"] == summary["samples_seen"]
    assert planned["devices_per_replica"] == summary["devices_per_replica"] == len(planned["memory"])
    assert planned["replicas"] * planned["devices_per_replica"] == summary["world_size"] == len(planned["ranks"])
    path = Path(summary["last_checkpoint"])
    assert planned["global_batch_size"] == load(path)["global_batch_size"]
    assert planned["checkpoint_bytes"] == pytest.approx(path.stat().st_size, rel=0.01)
    notes = [json.loads((tmp_path / f"rank_{number}.json").read_text()) for number in range(world_size)]
    for number, noted in enumerate(notes):
        memory = planned["memory"][number % len(planned["memory"])]
        for name in ("weights", "gradients", "optimizer", "batch", "activations"):
            assert set(noted[name]) == {memory[name]}, name
    batches = planned["accumulate_grad_batches"]
    # In the first step of all torch sees to it that neighbours are connected.
    passed = [sum(noted["passed"][batches : 2 * batches]) for noted in notes]
    assert planned["exchange"]["passed_bytes"] == max(passed) > 0
    assert planned["exchange"]["all_reduced_bytes"] == max(noted["all_reduced"][-1] for noted in notes)


MEASURED = [
    (["strategy.stages=3", "strategy.micro_batches=8"], 3),
    (["strategy.schedule=gpipe"], 4),
    ([*INTERLEAVED, "strategy.micro_batches=16"], 2),
    (["trainer.accumulate_grad_batches=2", "trainer.precision=bf16-mixed"], 2),
]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15),
    reason="torch before 2.15 keeps memory for what each micro-batch receives, which a plan leaves out",
)
@pytest.mark.parametrize(
    ("overrides", "world_size"),
    slow_but([], MEASURED, [MEASURED[0], *MEASURED[2:]]),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_step_of_a_pipeline_takes_what_a_real_one_takes(
    overrides: list[str], world_size: int, plan: Plan, one_batch_at_once: None
) -> None:
    """Each process, at most at a time, counted in the same way; a plan leaves out the indices of samples."""
    indices = 8 * (128 + 64)
    size = ["data.num_samples=128", "data.batch_size=32", "data.val_samples=64", "data.val_batch_size=16"]
    model = ["model=mlp", "model.hidden_features=[256,256,256]", "data.in_features=64"]
    overrides = [*model, *overrides, *PIPELINE, *size, f"launcher.nproc_per_node={world_size}"]
    planned = plan(*overrides)["memory"]

    def real(world: World, store: Store | None) -> dict[str, int]:
        recipe = make_recipe(make_job([*QUICK, *overrides]), world, Control(world, Messages(store), 60))
        join(recipe)
        run, tracker, cpu = (
            make_run(recipe, make_stop_controller(recipe)),
            MemoryTracker(rounded=1),
            torch.device("cpu"),
        )
        tracker.add((*run.task.parameters(), *run.task.buffers()))
        batches = run.train.batches(0, 0, run.trainer.accumulate_grad_batches)
        with tracker:
            for _ in range(2):
                forward_backward(run, batches)
                run.optimizer.step()
                free_gradients(run)
            training, tracker.peak = tracker.peak[cpu], tracker.allocated.copy()
            evaluate(run.task, run.val, run.strategy, run.precision)
        return {"training": training, "validation": tracker.peak[cpu]}

    for number, taken in enumerate(on_ranks(real, world_size)):
        memory = planned[number % len(planned)]
        assert {name: memory[name] for name in taken} == pytest.approx(taken, rel=0.005, abs=indices + 1000)


def free_gradients(run: TrainingRun) -> None:
    """Return once they are freed: gloo's thread lets go of what it has reduced some time after its caller goes on."""
    gradients = [weakref.ref(each.grad.untyped_storage()) for each in run.task.parameters() if each.grad is not None]
    assert gradients
    run.optimizer.zero_grad()
    until(lambda: all(gradient() is None for gradient in gradients), 60, "gradients freed")


@pytest.mark.slow
def test_a_process_keeps_as_many_micro_batches_as_its_schedule_has_under_way(plan: Plan) -> None:
    size = ["strategy.stages=3", "strategy.micro_batches=8", "data.batch_size=32", "data.num_samples=256"]
    kept = {
        schedule: [
            each["activations"]
            for each in plan(*DEEP, *PIPELINE, *size, f"strategy.schedule={schedule}", *more)["memory"]
        ]
        for schedule, more in (("gpipe", []), ("1f1b", []))
    }
    for process, (all_of_them, some) in enumerate(zip(kept["gpipe"], kept["1f1b"], strict=True)):
        assert all_of_them * (3 - process) == some * 8 > 0


@pytest.mark.slow
def test_a_replica_may_span_nodes(plan: Plan) -> None:
    four = [*DEEP, "strategy=ddp_pipeline", "strategy.stages=4", "data.num_samples=64", "data.batch_size=16"]
    planned = plan(*four, "plan.nnodes=2", "plan.gpus_per_node=2", "plan.interconnect_gbps=8")
    assert (planned["replicas"], planned["devices_per_replica"], planned["devices_left_over"]) == (1, 4, 0)
    placed = [(each["node"], each["devices"], each["stages"]) for each in planned["ranks"]]
    assert placed == [(0, ["cuda:0"], [0]), (0, ["cuda:1"], [1]), (1, ["cuda:0"], [2]), (1, ["cuda:1"], [3])]
    assert {each["samples_an_epoch"] for each in planned["ranks"]} == {64}
    crossing = 4 * 64 * 16  # bytes of a batch that cross each cut, each way
    assert planned["exchange"]["passed_bytes"] == 2 * crossing
    assert planned["exchange"]["at_least_seconds"] == pytest.approx(crossing / 1e9)
    two = plan(*four, "plan.nnodes=2", "plan.gpus_per_node=5", "plan.interconnect_gbps=8")
    assert (two["replicas"], two["devices_left_over"], kinds(two)) == (2, 2, ["devices_left_over"])
    assert "strategy.stages=4 takes 4 GPUs for each replica, and nodes have 5" in message(two, "devices_left_over")
    gradients = sum(each["gradients"] for each in two["memory"]) + 4 * 12  # and a mark for each of 12 parameters
    assert two["exchange"]["at_least_seconds"] == pytest.approx(gradients / 1e9)


@pytest.mark.nightly
def test_the_smallest_number_of_stages_that_fits_is_the_smallest(plan: Plan) -> None:
    overrides = [*GPUS, *DEEP, "strategy=ddp_pipeline", "strategy.schedule=gpipe", "data.in_features=64"]
    two, three = (max(each["peak"] for each in plan(*overrides, f"strategy.stages={k}")["memory"]) for k in (2, 3))
    assert three < two
    planned = plan(*overrides, f"plan.gpu_memory_gb={(two + three) / 2 / 1e9}")
    assert (planned["fits"], planned["smallest_stages"]) == (False, 3)
    assert "It fits with strategy.stages=3, the smallest number" in message(planned, "memory_does_not_fit")
    none = plan(*overrides, "plan.gpu_memory_gb=1e-6")
    assert none["smallest_stages"] is None
    assert "No number of stages that there are GPUs for makes it fit" in message(none, "memory_does_not_fit")


@pytest.mark.slow
def test_what_is_wrong_with_a_pipeline_is_found(plan: Plan) -> None:
    planned = plan(*DEEP, *PIPELINE, "strategy.stages=3", "strategy.schedule=gpipe", "strategy.micro_batches=2")
    assert "Use strategy.micro_batches=12, or at least 3" in message(planned, "pipeline_not_filled")
    assert planned["pipeline"] == {
        "schedule": "gpipe",
        "stages": 3,
        "stages_per_process": 1,
        "micro_batches": 2,
        "bubble": pytest.approx(1 / 2),
    }
    small = plan(*DEEP, *PIPELINE, "data.global_batch_size=3")
    assert "a replica's batch of 3 samples is too small for strategy.micro_batches=4" in message(
        small, "pipeline_not_filled"
    )
    norm = plan("model._target_=own_parts.Norm", *PIPELINE)
    assert "statistics from 2 of the 8 samples" in message(norm, "batch_norm_without_sync")
    branching = plan("model._target_=plan_parts.Branching", *PIPELINE)
    assert (branching["memory"], branching["exchange"]["passed_bytes"]) == (None, None)
    assert "A step could not be run without data" in message(branching, "not_rehearsed")


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stages_hold_what_a_whole_replica_does(plan: Plan) -> None:
    whole = plan(*GPUS, *MANY)
    split = plan(*GPUS, *MANY, "model.num_devices=3")
    assert (whole["replicas"], split["replicas"], len(split["memory"])) == (16, 4, 3)
    for name in ("weights", "gradients", "optimizer", "batch"):
        assert sum(each[name] for each in split["memory"]) == whole["memory"][0][name]
    assert max(each["training"] for each in split["memory"]) < whole["memory"][0]["training"]


@pytest.mark.slow
def test_mixed_precision_keeps_half(plan: Plan) -> None:
    precise, mixed = (
        plan(
            *GPUS,
            "model=mlp",
            "model.hidden_features=[64,64,64]",
            "data.batch_size=512",
            "data.num_samples=8192",
            *overrides,
        )["memory"][0]
        for overrides in ([], ["trainer.precision=bf16-mixed"])
    )
    assert mixed["weights"] == precise["weights"]
    assert mixed["activations"] < 0.65 * precise["activations"]


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["strategy=single"], 0),
        (["strategy=ddp"], 0),
        (["strategy=ddp", "strategy.gradient_as_bucket_view=false"], 1),
    ],
)
def test_buckets_are_a_copy_unless_gradients_are_views_of_them(overrides: list[str], copies: int, plan: Plan) -> None:
    (memory,) = plan(*GPUS, *overrides)["memory"]
    assert memory["exchange"] == copies * memory["gradients"] == copies * 4 * 165


@pytest.mark.slow
def test_the_smallest_number_of_devices_that_fits_is_the_smallest(plan: Plan) -> None:
    overrides = ["plan.nnodes=2", "plan.gpus_per_node=4", "model=mlp", "model.hidden_features=[64,64,64,64]"]
    peaks = [max(each["peak"] for each in plan(*overrides, f"model.num_devices={k}")["memory"]) for k in (1, 2, 3)]
    assert peaks == sorted(set(peaks), reverse=True)
    there = f"plan.gpu_memory_gb={(peaks[1] + peaks[2]) / 2 / 1e9}"
    planned = plan(*overrides, there)
    assert planned["fits"] is False
    assert planned["smallest_k"] == 3
    assert "It fits with model.num_devices=3, the smallest number" in message(planned, "memory_does_not_fit")
    assert plan(*overrides, there, "model.num_devices=3")["fits"] is True
    assert plan(*overrides, "plan.gpu_memory_gb=1e-6")["smallest_k"] is None


def test_a_flow_that_depends_on_values_leaves_activations_unknown(plan: Plan) -> None:
    planned = plan("model._target_=plan_parts.Branching", *GPUS, "plan.gpu_memory_gb=80")
    assert planned["memory"] is None
    assert planned["fits"] is None
    assert planned["checkpoint_bytes"] > 0
    assert "A step could not be run without data" in message(planned, "not_rehearsed")


@pytest.mark.parametrize("kind", slow_but(["dataclass"], ["dataclass", "mapping"]))
def test_batches_count_whatever_they_are_made_of(kind: str, plan: Plan) -> None:
    own = [*OF_KIND, "plan.gpus_per_node=1"]
    (of_tuple,) = plan(*own, "task._target_=ddp_recipes.tasks.Task", "data.collate_fn=data_parts.padded")["memory"]
    (of_kind,) = plan(*own, f"data.collate_fn.kind={kind}")["memory"]
    assert of_kind["batch"] == of_tuple["batch"] == 8 * (10 * 4 + 8)


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_a_batch_that_is_not_dense_leaves_activations_unknown(kind: str, plan: Plan) -> None:
    found = message(plan(*OF_KIND, f"data.collate_fn.kind={kind}"), "not_rehearsed")
    assert found.endswith(f"TypeError: a batch has a {kind} tensor")


def test_an_optimizer_that_reads_values_leaves_what_it_keeps_unknown(plan: Plan) -> None:
    planned = plan("optimizer._target_=plan_parts.Reading", "strategy=single")
    assert (planned["memory"], planned["checkpoint_bytes"]) == (None, None)
    assert "A step could not be run without data" in message(planned, "not_rehearsed")


@pytest.mark.parametrize(
    "overrides", quick_each(2, [[*GPUS, "model=toy_mp"], ["launcher.device=cpu", "model.num_devices=2"]])
)
def test_devices_that_cannot_be_told_apart_are_counted_as_one(overrides: list[str], plan: Plan) -> None:
    planned = plan(*overrides, "plan.gpu_memory_gb=1")
    assert planned["memory_of_replica"] is True
    assert planned["devices_per_replica"] == 2
    assert planned["fits"] is True
    (memory,) = planned["memory"]
    assert memory["weights"] == 4 * 165


# --- findings --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_good_plan_has_no_findings(plan: Plan) -> None:
    planned = plan(*GPUS, "plan.gpu_memory_gb=80", "plan.interconnect_gbps=100")
    assert planned["findings"] == []
    assert planned["fits"] is True
    assert planned["exchange"]["at_least_seconds"] == pytest.approx(2 * (1 / 2) * 165 * 4 * 8 / 100e9)


@pytest.mark.slow
def test_what_is_wrong_is_found(plan: Plan) -> None:
    planned = plan(*GPUS, "model.num_devices=2", "model.split=[net2]", "model.micro_batches=16", "plan.gpus_per_node=5")
    assert kinds(planned) == ["devices_left_over", "pipeline_not_filled"]
    assert "2 of 10 GPUs are left over" in message(planned, "devices_left_over")
    assert planned["pipeline"] == {"schedule": "gpipe", "stages": 2, "micro_batches": 8, "bubble": pytest.approx(1 / 9)}
    planned = plan(*GPUS, "model._target_=own_parts.Norm")
    assert "statistics from 4 of the 61 samples" in message(planned, "batch_norm_without_sync")
    assert kinds(plan(*GPUS, "model._target_=own_parts.Norm", "strategy.sync_batchnorm=true")) == []
    planned = plan(*GPUS, "model._target_=own_parts.Spare", "strategy.static_graph=true")
    assert "spare.weight, spare.bias. With strategy.static_graph=true" in message(planned, "unused_parameters")


# --- how it is asked for ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_thousands_of_ranks(plan: Plan) -> None:
    planned = plan("plan.nnodes=512", "plan.gpus_per_node=8", "data.num_samples=100003", "data.batch_size=3")
    assert planned["world_size"] == len(planned["ranks"]) == 4096
    assert planned["ranks"][4095]["node"] == 511
    assert planned["ranks"][4095]["devices"] == ["cuda:7"]
    assert sum(each["samples_an_epoch"] for each in planned["ranks"]) == 100003
    staged = plan("plan.nnodes=512", "plan.gpus_per_node=8", "data.num_samples=100003", "strategy=ddp_pipeline")
    assert (staged["replicas"], staged["global_batch_size"]) == (2048, 2048 * 8)
    assert sum(each["samples_an_epoch"] for each in staged["ranks"]) == 2 * 100003


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mode=test"], "plan=true plans training, but mode=test is none"),
        (["model._target_=lightning_parts.Memory", "task=lightning"], "and LBFGS takes several, by a closure"),
        (["ckpt_path=auto"], "leave out ckpt_path=auto"),
        (["check=equivalence"], "leave out check=equivalence"),
        (["plan.gpu_memory_gb=-1"], "cluster.gpu_memory_gb=-1 is not allowed. Allowed: a number at least 1e-06"),
        (["plan.nnodes=0"], "cluster.nnodes=0 is not allowed. Allowed: a whole number at least 1, or null."),
        (["+plan.nodes=2"], "cluster.nodes is not a key"),
        (["plan.gpus_per_node=0", "launcher.device=cuda"], "launcher.device=cuda, but cluster.gpus_per_node=0"),
        (["plan.gpus_per_node=1", "model.num_devices=2", "model.split=[net2]"], "cannot run on 1 visible GPU"),
        (["strategy=dp", "plan.gpus_per_node=2"], "plan=true does not know strategy=dp on several GPUs"),
        (
            ["strategy=ddp_pipeline", "plan.gpus_per_node=1", "plan.nnodes=3"],
            "takes 2 processes for each replica, and 3",
        ),
        (["strategy=ddp_exact", "plan.gpus_per_node=8"], "strategy.shards=12 cannot be dealt evenly to 8 processes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_planned_is_refused(overrides: list[str], said: str, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refusal:
        plan(*overrides)
    assert said in str(refusal.value)


def test_a_plan_trains_nothing(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    summary = run(*QUICK, "plan=true", directory=tmp_path / "run")
    assert (summary["global_step"], summary["samples_seen"], summary["last_checkpoint"]) == (0, 0, None)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml",
        "plan.json",
        "summary.json",
        "train.log",
    }
    shown = capfd.readouterr()
    assert re.search(r"memory +[\d.]+ kB in training \(weights 660 B", shown.out + shown.err)
