"""Servers and workers: the numbers of ddp in step, a bound on how far apart they run, and workers that die."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch

from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import at_night, quick_each, slow_but
from helpers.processes import ran, summary

Run = Callable[..., Summary]
Weights = Callable[[Summary], dict[str, Any]]

PS = "strategy=parameter_server"
TWO_SERVERS = [PS, "strategy.servers=2"]
ASYNCHRONOUS = [PS, "strategy.staleness=2"]
PARTS = "parameter_server_parts"

LEARNING = {
    "momentum": [],
    "fewer samples than workers in the last batch": ["data.num_samples=49"],
    "strided": ["data.shard=strided"],
    "accumulation, clipping": ["trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.05"],
    "adamw, cosine, clipping by value": [
        "optimizer=adamw",
        "scheduler=cosine",
        "trainer.gradient_clip_val=0.01",
        "trainer.gradient_clip_algorithm=value",
    ],
    "batch norm": ["model._target_=own_parts.Norm"],
    "buffers that training reads": ["model._target_=own_parts.Centered"],
    "dropout, sample by sample": ["model._target_=own_parts.Dropout", "data.train._target_=own_parts.OneByOne"],
    "bf16-mixed": ["trainer.precision=bf16-mixed"],
}


@pytest.mark.parametrize(
    ("name", "workers"),
    slow_but(
        [("accumulation, clipping", 2)],
        [(name, w) for name in LEARNING for w in (2, 3)],
        daily=[
            ("batch norm", 3),
            ("fewer samples than workers in the last batch", 3),
            ("dropout, sample by sample", 2),
        ],
    ),
)
def test_synchronous_servers_give_the_bits_of_ddp(name: str, workers: int, run: Run) -> None:
    overrides = ["data.num_samples=61", "data.global_batch_size=16", *LEARNING[name]]
    ddp = run("strategy=ddp", *overrides, world_size=workers)
    for servers in (1, 2):
        if servers == 2 and "trainer.gradient_clip_val=0.05" in overrides:
            continue  # see below
        ps = run(PS, f"strategy.servers={servers}", *overrides, world_size=servers + workers)
        assert ps["weights_sha256"] == ddp["weights_sha256"]
        for number in ("global_step", "epoch", "samples_seen"):
            assert ps[number] == ddp[number]
        assert ps["metrics"]["val/loss"] == pytest.approx(ddp["metrics"]["val/loss"], rel=1e-6)


@pytest.mark.slow
def test_several_servers_clip_by_the_norm_over_all(run: Run, weights: Weights) -> None:
    """It is that of ddp up to rounding: squares are added in another order."""
    overrides = ["trainer.gradient_clip_val=0.05", "trainer.log_every_n_steps=1", "data.num_samples=61"]
    ddp = run("strategy=ddp", *overrides, world_size=2)
    ps = run(*TWO_SERVERS, *overrides, world_size=4)
    torch.testing.assert_close(weights(ps), weights(ddp), rtol=0, atol=1e-6)
    assert ps["metrics"]["train/grad_norm"] == pytest.approx(ddp["metrics"]["train/grad_norm"], rel=1e-5)
    assert ps["metrics"]["train/loss"] == pytest.approx(ddp["metrics"]["train/loss"], rel=1e-6)


@pytest.mark.parametrize("staleness", quick_each(2, [2, 0]))
def test_ranks_evaluate_the_servers_weights_and_servers_alone_hold_optimizer_state(
    staleness: int, run: Run, tmp_path: Path
) -> None:
    notes = f"+callbacks.look={{_target_: {PARTS}.Look, folder: {tmp_path}}}"
    done = run(*TWO_SERVERS, f"strategy.staleness={staleness}", notes, world_size=4)
    seen = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(4)]
    assert len(seen[0]["weights"]) == 2
    assert all(each["weights"] == seen[0]["weights"] for each in seen)
    assert seen[0]["weights"][-1] == done["weights_sha256"]
    states = [each["states"] for each in seen]
    assert states[2:] == [0, 0]
    assert min(states[:2]) > 0
    assert sum(states) == 4


RESUMES = {
    "ps": ([PS], 3, [PS], 3),
    "ps to ddp": ([PS], 3, ["strategy=ddp"], 2),
    "ddp to ps": (["strategy=ddp"], 2, [PS], 3),
    "ps to two servers": ([PS], 3, TWO_SERVERS, 4),
    "two servers to ps": (TWO_SERVERS, 4, [PS], 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["ps"], RESUMES))
def test_resume_with_any_strategy_ends_with_the_same_bits(name: str, run: Run) -> None:
    first, world_size, second, other = RESUMES[name]
    overrides = ["data.num_samples=61", "data.global_batch_size=16", "optimizer=adamw", "scheduler=cosine"]
    overrides += ["model._target_=own_parts.Norm", "checkpoint.every_n_steps=3", "checkpoint.save_top_k=-1"]
    whole = run("strategy=ddp", *overrides, world_size=2)
    begun = run(*first, *overrides, world_size=world_size)
    middle = Path(begun["run_directory"]) / "checkpoints" / "step_00000003.pt"
    assert load(middle)["cursor"]["batch"] == 3, "in the midst of an epoch"
    resumed = run(*second, *overrides, f"ckpt_path={middle}", world_size=other)
    assert resumed["weights_sha256"] == begun["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_resume_in_one_process_learns_the_same(run: Run, weights: Weights) -> None:
    overrides = ["data.num_samples=61", "data.global_batch_size=16", "checkpoint.every_n_steps=3"]
    whole = run(PS, *overrides, world_size=3)
    first = run(PS, *overrides, "trainer.max_steps=3", world_size=3)
    resumed = run("strategy=single", *overrides, f"ckpt_path={first['last_checkpoint']}")
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", quick_each(2, [ASYNCHRONOUS, [PS]]), ids=str)
def test_every_sample_is_evaluated_and_predicted_once(strategy: list[str], run: Run) -> None:
    path = run("strategy=ddp", world_size=2)["last_checkpoint"]
    for mode in ("validate", "predict"):
        ddp = run("strategy=ddp", f"mode={mode}", f"ckpt_path={path}", world_size=2)
        ps = run(*strategy, f"mode={mode}", f"ckpt_path={path}", world_size=3)
        assert ps["metrics"] == pytest.approx(ddp["metrics"], rel=1e-6)
    one, other = (torch.load(Path(each["run_directory"]) / "predictions.pt") for each in (ddp, ps))
    torch.testing.assert_close(other, one, rtol=0, atol=1e-6)


# --- asynchronous ----------------------------------------------------------------------------------------------------

STALE = [(staleness, servers) for staleness in (0, 1, 2, 4) for servers in (1, 2)]


@pytest.mark.parametrize(("staleness", "servers"), slow_but([], STALE, daily=[(2, 2)]))
def test_staleness_bounds_how_far_workers_run_ahead(staleness: int, servers: int, run: Run, tmp_path: Path) -> None:
    model = [f"model._target_={PARTS}.Traced", f"+model.folder={tmp_path}", "+model.global_batch=16"]
    slow = [f"+model.slow={servers}", "+model.seconds=0.3", f"+model.ahead={staleness}"]
    data = [f"data.train._target_={PARTS}.Numbered", "data.num_samples=480", "data.shuffle=false"]
    strategy = [PS, f"strategy.servers={servers}", f"strategy.staleness={staleness}"]
    once = ["trainer.max_epochs=1", "data.global_batch_size=16", "trainer.max_time=null"]
    done = run(*strategy, *model, *slow, *data, *once, world_size=servers + 2)
    assert done["global_step"] == 30
    ended: Counter[int] = Counter()
    shards: Counter[int] = Counter()
    ahead = []
    for line in (tmp_path / "trace").read_text().splitlines():
        what, step, rank = line.split()
        if what == "end":
            ended[int(step)] += 1
            shards[int(rank)] += 1
        else:
            slowest = next(earlier for earlier in range(31) if ended[earlier] < 2)
            ahead.append(int(step) - slowest)
    assert ended == dict.fromkeys(range(30), 2), "each shard of each batch once"
    assert max(ahead) == staleness, "no more, and as much as is allowed"
    if staleness:
        assert shards[servers] < shards[servers + 1], "the slow one does fewer"


@pytest.mark.slow
def test_asynchronous_training_learns_and_counts_every_sample(run: Run) -> None:
    start = run("optimizer.lr=0", world_size=2)
    done = run(*ASYNCHRONOUS, "data.num_samples=61", "trainer.max_epochs=6", world_size=4)
    assert done["samples_seen"] == 6 * 61
    assert done["metrics"]["val/loss"] < 0.8 * start["metrics"]["val/loss"]
    resumed = run(
        *ASYNCHRONOUS,
        "data.num_samples=61",
        "trainer.max_epochs=8",
        f"ckpt_path={done['last_checkpoint']}",
        world_size=4,
    )
    assert (resumed["global_step"], resumed["samples_seen"]) == (done["global_step"] // 6 * 8, 8 * 61)


# --- workers that die ------------------------------------------------------------------------------------------------

MORTAL = ["model=toy", f"model._target_={PARTS}.Mortal", "data=random", "data.num_samples=200", "trainer.max_epochs=3"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder to start runs from, with the model."""
    shutil.copy(Path(__file__).with_name(f"{PARTS}.py"), tmp_path)
    return tmp_path


def mortal(rank: int, signal: int = SIGKILL) -> list[str]:
    model = [f"+model.rank={rank}", "+model.batch=5", f"+model.number={int(signal)}"]
    return [*MORTAL, *model, "data.batch_size=4", "hydra.run.dir=run", "logger=none"]


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("servers", [1, *at_night(2)])
def test_dead_worker_is_named_and_the_others_go_on(servers: int, folder: Path) -> None:
    processes = [f"strategy.servers={servers}", f"launcher.nproc_per_node={servers + 3}"]
    ended = ran(folder, *ASYNCHRONOUS, *mortal(rank=servers + 1), *processes)
    assert ended.status == 0, ended.err
    log = (folder / "run" / "train.log").read_text()
    died = f"Rank {servers + 1} died; 2 of 3 workers go on. Lost with it, out of 3 shards of each batch: 1 of step"
    assert log.count(died) == servers
    done = summary(folder / "run")
    assert (done["status"], done["global_step"], done["samples_seen"]) == ("finished", 3 * 17, 3 * 200)
    assert not (folder / "run" / "ranks").exists()
    assert load(folder / "run" / "checkpoints" / "last.pt")["cursor"]["step"] == 3 * 17


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("name", ["send", *at_night("recv")])
@pytest.mark.parametrize("servers", [1, *at_night(2)])
def test_a_worker_that_dies_in_the_middle_of_a_message_is_left_out(servers: int, name: str, folder: Path) -> None:
    """Gloo tells nobody."""
    own = [*ASYNCHRONOUS, f"strategy.servers={servers}", f"launcher.nproc_per_node={servers + 3}"]
    own += [
        "data=random",
        "data.num_samples=96",
        "trainer.max_steps=6",
        "model=mlp",
        "model.hidden_features=[4096,2048]",
    ]
    dies = f"{{_target_: {PARTS}.KilledInTransfer, rank: {servers + 1}, name: {name}}}"
    ended = ran(folder, *own, "checkpoint=none", "hydra.run.dir=run", "logger=none", f"+callbacks.dies={dies}")
    assert ended.status == 0, ended.err
    assert f"Rank {servers + 1} died; 2 of 3 workers go on." in (folder / "run" / "train.log").read_text()


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rank", "processes", "message"),
    [
        pytest.param([PS], 2, 3, "Rank 2 (process ", id="synchronous", marks=pytest.mark.nightly),
        pytest.param(ASYNCHRONOUS, 1, 2, "Rank 1 died, the last worker.", id="the last worker"),
        pytest.param(
            [*ASYNCHRONOUS, "strategy.servers=2"], 1, 4, "Rank 1 (process ", id="a server", marks=pytest.mark.nightly
        ),
    ],
)
def test_death_that_a_run_does_not_outlive_ends_it(
    strategy: list[str], rank: int, processes: int, message: str, folder: Path
) -> None:
    model = mortal(rank) if message != "Rank 1 (process " else [*mortal(9), f"+callbacks.end._target_={PARTS}.Leave"]
    ended = ran(folder, *strategy, *model, f"launcher.nproc_per_node={processes}")
    assert ended.status == 1
    assert message in ended.err
    assert summary(folder / "run")["status"] == "failed"


@pytest.mark.spawn
@pytest.mark.slow
def test_error_of_a_worker_ends_the_run_with_its_traceback(folder: Path) -> None:
    ended = ran(folder, *ASYNCHRONOUS, *mortal(rank=2, signal=0), "launcher.nproc_per_node=4")
    assert ended.status == 1
    assert ended.err.startswith("Rank 2 failed:\nTraceback")
    assert ended.err.rstrip().endswith("ValueError: the cat sat on the worker")
    assert "died" not in (folder / "run" / "train.log").read_text()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "world_size", "message"),
    [
        ([], 1, "strategy.servers=1 of 1 process(es) leave no worker. Use at least 2 processes"),
        (["strategy.servers=3"], 3, "strategy.servers=3 of 3 process(es) leave no worker."),
        (["strategy.servers=0"], 3, "strategy.servers=0 is not allowed. Allowed: a whole number at least 1."),
        (["strategy.staleness=-1"], 3, "strategy.staleness=-1 is not allowed. Allowed: a whole number at least 0."),
        (["strategy.staleness=none"], 3, "strategy.staleness=none is not allowed."),
        (["+strategy.stalenes=1"], 3, "Did you mean 'staleness'?"),
        (["strategy.processes=4"], 3, "strategy.processes=4, but 3 process(es) are to run."),
        (["trainer.precision=16-mixed"], 3, "trainer.precision=16-mixed does not go with strategy=parameter_server"),
        (["check=equivalence"], 3, "check=equivalence does not go with strategy=parameter_server"),
        (["plan=true"], 3, "plan=true does not know what strategy=parameter_server exchanges."),
        (["model._target_=exact_parts.Sparse"], 3, "strategy=parameter_server sends dense gradients"),
        (["model._target_=own_parts.SavedAnnealed"], 3, "a SavedAnnealed saves more (get_extra_state), which servers"),
        (["strategy.staleness=1", "+task.metrics.r2._target_=torchmetrics.R2Score"], 3, "metrics of torchmetrics (r2)"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(
    overrides: list[str], world_size: int, message: str, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "refused"
    with pytest.raises(RequestError) as refusal:
        run(PS, *overrides, world_size=world_size, directory=folder)
    assert message in str(refusal.value)
    assert not folder.exists() or not any(folder.iterdir())
