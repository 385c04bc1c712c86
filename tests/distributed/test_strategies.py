"""What is set for a strategy, a precision or torch itself takes effect, and runs."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel

from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.models import Toy
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.tensors import digest
from ddp_recipes.runtime.world import World
from ddp_recipes.strategies import DDP, DDPSettings
from ddp_recipes.tasks import Task
from ddp_recipes.testing import on_ranks
from helpers.marks import at_night, quick_each, slow_but

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]
CPU = torch.device("cpu")


def wrapped(world: World, store: Store | None, **options: Any) -> dict[str, Any]:
    """Return what DDP says of itself after one step."""
    from datetime import timedelta

    strategy = DDP(DDPSettings(**options))
    strategy.setup(world, None if store is None else Messages(store), "gloo", timedelta(seconds=60), None)
    try:
        module = strategy.wrap(Task(Toy(), nn.MSELoss()), [CPU])
        assert isinstance(module, DistributedDataParallel)
        module((torch.ones(2, 10), torch.ones(2, 5))).loss.backward()
        return {
            "find_unused_parameters": module.find_unused_parameters,
            "static_graph": module.static_graph,
            "gradient_as_bucket_view": module.gradient_as_bucket_view,
            "bucket_bytes": module.bucket_bytes_cap,
            "device_ids": module.device_ids,
            "hooked": "comm_hook" in module._get_ddp_logging_data(),  # type: ignore[no-untyped-call]
        }
    finally:
        strategy.teardown()


@pytest.mark.slow
def test_options_reach_ddp() -> None:
    for options in (
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True, "bucket_cap_mb": None},
    ):
        for seen in on_ranks(partial(wrapped, **options), 2):
            assert {name: seen[name] for name in options if name in seen} == {
                name: value for name, value in options.items() if name in seen
            }
            assert seen["device_ids"] is None
            assert seen["hooked"], "ranks of one machine share memory"
    (seen, _) = on_ranks(partial(wrapped, shared_memory=False), 2)
    assert not seen["hooked"]
    (seen, _) = on_ranks(partial(wrapped, bucket_cap_mb=3, comm_hook="bf16"), 2)
    assert seen["bucket_bytes"] == 3 * 2**20
    assert seen["hooked"]


HARMLESS = [
    (["strategy.static_graph=true"], 1e-6),
    (["strategy.static_graph=true", "trainer.accumulate_grad_batches=2"], 1e-6),
    (["strategy.find_unused_parameters=true"], 1e-6),
    (["strategy.gradient_as_bucket_view=false"], 1e-6),
    (["strategy.bucket_cap_mb=1"], 1e-6),
    (["+strategy.init_sync=false"], 1e-6),
    (["strategy.comm_hook=fp16"], 5e-3),
    (["strategy.comm_hook=bf16"], 5e-2),
]


@pytest.mark.parametrize(
    ("overrides", "atol"),
    slow_but(HARMLESS[::3], HARMLESS),
    ids=str,
)
def test_options_leave_the_result(overrides: list[str], atol: float, run: Run, weights: Weights) -> None:
    learning = ["data.global_batch_size=16", *(one for one in overrides if one.startswith("trainer"))]
    expected = weights(run(*learning))
    found = weights(run("data.global_batch_size=16", *overrides, world_size=2))
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.slow
def test_ranks_exchange_no_batch_norms_and_rank_0_ends_with_the_same(run: Run) -> None:
    """Training does not read them, and an evaluation gets rank 0's. Anybody else's buffers are exchanged."""

    def digest(model: str, *overrides: str) -> tuple[str, float]:
        summary = run(f"model._target_=own_parts.{model}", *overrides, world_size=2)
        return summary["weights_sha256"], summary["metrics"]["val/loss"]

    always, never = "strategy.broadcast_buffers=true", "strategy.broadcast_buffers=false"
    assert digest("Norm") == digest("Norm", always) == digest("Norm", never)
    assert digest("Centered") == digest("Centered", always) != digest("Centered", never)


@pytest.mark.slow
def test_powersgd_runs_and_learns(run: Run) -> None:
    options = ["strategy.comm_hook=powersgd", "trainer.max_epochs=6"]
    start, end = (
        run(*options, lr, world_size=2)["metrics"]["val/loss"] for lr in ("optimizer.lr=0", "optimizer.lr=0.05")
    )
    assert end < start


@pytest.mark.slow
def test_parameters_without_gradient_need_their_option(run: Run, tmp_path: Path) -> None:
    spare = "model._target_=own_parts.Spare"
    assert run(spare)["status"] == "finished"
    assert run(spare, "strategy.find_unused_parameters=true", world_size=2)["status"] == "finished"
    folder = tmp_path / "failed"
    with pytest.raises(RunFailed):
        run(spare, world_size=2, directory=folder)
    told = (folder / "ranks" / "rank_0.txt").read_text().splitlines()[-1]
    assert told.startswith("The loss does not depend on these parameters: spare.weight, spare.bias. Take them out")
    assert "strategy.find_unused_parameters=true" in told
    assert json.loads((folder / "summary.json").read_text())["error"].endswith(told)


LAZY = {"ddp": 2, "ddp_exact": 2, "fsdp": 2, "ddp_pipeline": 2, "parameter_server": 3, "single": 1}


@pytest.mark.parametrize("strategy", slow_but(["ddp", "fsdp"], LAZY))
def test_lazy_modules_have_their_shapes_before_ranks_meet(strategy: str, run: Run, weights: Weights) -> None:
    small = ["model._target_=differential.architectures.Lazy", "data.global_batch_size=12", "optimizer.lr=0.02"]
    cut = ["model.num_devices=2"] if strategy == "single" else []
    found = weights(run(*small, f"strategy={strategy}", *cut, world_size=LAZY[strategy]))
    torch.testing.assert_close(found, weights(run(*small, "strategy=single")), rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["64-true", *at_night("bf16-true")])
def test_lazy_modules_are_tried_out_before_they_are_converted(precision: str, run: Run) -> None:
    small = ["model._target_=differential.architectures.Lazy", "data.global_batch_size=12", "trainer.max_steps=2"]
    assert run(*small, f"trainer.precision={precision}", world_size=2)["status"] == "finished"


def test_lazy_modules_are_exported_in_the_shapes_of_the_checkpoint(run: Run) -> None:
    lazy = ["model._target_=differential.architectures.Lazy"]
    trained = run(*lazy, "strategy=single", "trainer.max_steps=2")
    export = [*lazy, "mode=export", f"ckpt_path={trained['run_directory']}"]
    with pytest.raises(RequestError, match="There is no batch to try out at this point, which strategy=single does"):
        run(*export, world_size=2)
    exported = run(*export, "strategy=single")
    saved = load_file(Path(exported["run_directory"]) / "model.safetensors")
    assert digest(saved) == trained["weights_sha256"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning")
@pytest.mark.parametrize("own", [["strategy=fsdp"], *at_night(["strategy=ddp_pipeline"], ["model.num_devices=2"])])
def test_what_is_scripted_is_refused_where_blocks_take_hooks(own: list[str], run: Run) -> None:
    with pytest.raises(RequestError, match=r"The model is a ScriptModule, whose blocks take no hooks"):
        run("model._target_=own_parts.scripted", *own, world_size=1 if "model.num_devices=2" in own else 2)


@pytest.mark.slow
@pytest.mark.parametrize("own", [["strategy=ddp_pipeline"], ["strategy=single", "model.num_devices=2"]])
def test_a_weight_that_is_computed_before_each_pass_can_be_cut(own: list[str], run: Run, weights: Weights) -> None:
    small = ["model._target_=differential.architectures.Pruned", "data.global_batch_size=12"]
    found = weights(run(*small, *own, world_size=2 if "strategy=ddp_pipeline" in own else 1))
    torch.testing.assert_close(found, weights(run(*small, "strategy=single")), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        (
            ["strategy.comm_hook=fp8"],
            2,
            "strategy.comm_hook=fp8 is not allowed. Allowed: fp16, bf16, powersgd, or null.",
        ),
        (["strategy.sync_batchnorm=true"], 2, "strategy.sync_batchnorm=true works on GPUs only"),
        (["+strategy.bucket_cap=3"], 2, "Did you mean 'bucket_cap_mb'?"),
        (["strategy=dp", "model=toy_mp"], 1, "strategy=dp copies the model to every GPU"),
        (["model._target_=own_parts.Nowhere"], 2, "model._target_=own_parts.Nowhere cannot be found"),
        (["+model.depth=3"], 2, "depth"),
        (["data.global_batch_size=1"], 2, "data.global_batch_size=1 is less than one sample for each of 2 replicas"),
        (["data.train=null"], 2, "mode=fit needs data.train"),
        (["mode=test"], 2, "mode=test needs data.test"),
        (["data.num_samples=0"], 2, "num_samples=0"),
        (["scheduler.interval=epochs"], 2, "scheduler.interval=epochs is not known"),
        (
            ["model._target_=own_parts.LazyInTraining"],
            2,
            "net2.weight, net2.bias of the model get their shapes in a first forward pass, which ranks have to know "
            "before. A pass on a batch of the data did not do: the model does not run them in evaluation.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_on_all_ranks(
    overrides: list[str], world_size: int, message: str, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "refused"
    with pytest.raises(RequestError) as refusal:
        run(*overrides, world_size=world_size, directory=folder)
    assert message in str(refusal.value)
    assert not folder.exists() or not any(folder.iterdir())


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_a_rendezvous_of_ones_own(scheme: str, run: Run, tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"file://{tmp_path}/meeting" if scheme == "file" else f"tcp://127.0.0.1:{free.getsockname()[1]}"
    summary = run(f"launcher.init_method={address}", world_size=2)
    assert summary["weights_sha256"] == run(world_size=2)["weights_sha256"]


# --- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", quick_each(2, [2, 1]))
@pytest.mark.parametrize("precision", quick_each(2, ["16-mixed", "bf16-mixed"]))
def test_mixed_precision_learns_nearly_the_same(precision: str, world_size: int, run: Run, weights: Weights) -> None:
    overrides = ["data.global_batch_size=16", "trainer.gradient_clip_val=0.5", "trainer.log_every_n_steps=1"]
    full = run(*overrides, world_size=world_size)
    mixed = run(*overrides, f"trainer.precision={precision}", world_size=world_size)
    assert all(math.isfinite(value) for value in mixed["metrics"].values())
    assert mixed["weights_sha256"] != full["weights_sha256"]
    assert {value.dtype for value in weights(mixed).values()} == {torch.float32}
    torch.testing.assert_close(weights(mixed), weights(full), rtol=0, atol=2e-2)
    assert mixed["metrics"]["train/grad_norm"] == pytest.approx(full["metrics"]["train/grad_norm"], rel=0.1)


@pytest.mark.slow
def test_determinism_is_switched_on(run: Run, notes: Callable[[], list[dict[str, Any]]], noting: str) -> None:
    for value in (True, False):
        run(f"trainer.deterministic={str(value).lower()}", noting, world_size=2)
        assert [note["deterministic"] for note in notes()] == [value, value]


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")  # torch's hint on where it ran forward
def test_anomaly_detection_names_the_operation(run: Run) -> None:
    rooted = "model._target_=own_parts.Rooted"
    with pytest.raises(RunFailed, match=r"the model's weights .* are non-finite"):
        run(rooted)
    with pytest.raises(RuntimeError, match=r"Function 'MulBackward0' returned nan"):
        run(rooted, "trainer.detect_anomaly=true")


ONE_MESSAGE = [("ddp", 2, 1), ("fsdp", 2, 4), ("ddp_pipeline", 4, 3)]


def test_statistics_that_training_reads_are_those_of_rank_0(run: Run) -> None:
    """As with torch's own way, which sends buffers before each forward pass."""
    own = ["model._target_=own_parts.Norm", "+callbacks.freezes._target_=own_parts.Freezes", "trainer.max_epochs=1"]
    found = [run(*own, f"strategy.broadcast_buffers={each}", world_size=2) for each in ("null", "true")]
    assert found[0]["weights_sha256"] == found[1]["weights_sha256"]


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    slow_but(ONE_MESSAGE[:1], ONE_MESSAGE, daily=ONE_MESSAGE),
    ids=[name for name, *_ in ONE_MESSAGE],
)
def test_buffers_are_one_message_a_step(strategy: str, ranks: int, expected: int, run: Run, tmp_path: Path) -> None:
    """Ranks get rank 0's before a validation, and with fsdp after each of the three other steps.

    Stages get the last one's names of metrics as well, a length and a text for the one batch that is validated.
    """
    counted = f"+callbacks.counted={{_target_: own_parts.Broadcasts, path: {tmp_path / 'broadcasts'}}}"
    own = ["model._target_=own_parts.ManyNorms", "trainer.max_epochs=1", "trainer.num_sanity_val_steps=0"]
    run(f"strategy={strategy}", *own, "trainer.limit_val_batches=1", counted, world_size=ranks)
    assert [path.read_text() for path in sorted(tmp_path.glob("broadcasts_*"))] == [str(expected)] * ranks
