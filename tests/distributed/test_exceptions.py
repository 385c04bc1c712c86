"""An exception anywhere, with any strategy, on any rank: it is shown, soon, and the run is called failed."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes._compat.messages import out_of_memory, timed_out
from ddp_recipes.checkpointing.writing import disk_failure
from ddp_recipes.errors import RequestError, chain
from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but
from helpers.patience import patience
from helpers.recipes import QUICK

Run = Callable[..., Summary]

SOON_S = 15
PLACES = ["forward", "backward", "loss", "optimizer", "metric", "data", "save", "callback", "validation callback"]
RECIPE = [
    *("~model.hidden_features", "model._target_=raising_parts.Model", "data.train._target_=raising_parts.Data"),
    *("task.loss._target_=raising_parts.Loss", "+task.metrics.own={_target_: raising_parts.Metric}"),
    "+callbacks.counting={_target_: raising_parts.Counting}",
    *("data.batch_size=12", "trainer.max_epochs=3", "checkpoint.every_n_steps=3"),
]
STRATEGIES: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "ddp": (3, []),
    "ddp_exact": (3, []),
    "fsdp": (3, ["strategy.wrap=['0','2','4']"]),
    "fsdp, shards": (3, ["strategy.shards=6"]),
    "ddp_pipeline": (3, ["strategy.stages=3"]),
    "ddp_pipeline, gpipe": (3, ["strategy.stages=3", "strategy.schedule=gpipe"]),
    "parameter_server": (3, []),
}
CASES = [
    (name, place, rank)
    for name, (ranks, _) in STRATEGIES.items()
    for place in PLACES
    for rank in range(ranks)
    if (name, place) != ("parameter_server", "save")  # it refuses modules that save more than tensors
]


@pytest.mark.parametrize(
    ("name", "place", "rank"),
    slow_but(
        [("ddp", "save", 0)],
        CASES,
        daily=[
            case
            for number, case in enumerate(CASES)
            if number % 42 == 0 or (case[0] == "ddp_pipeline" and case[1:] in (("backward", 1), ("forward", 1)))
        ],
    ),
)
def test_an_exception_is_shown_soon_and_the_run_failed(
    name: str, place: str, rank: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, overrides = STRATEGIES[name]
    mark, folder = tmp_path / "raised", tmp_path / "run"
    monkeypatch.setenv("RAISES", f"{place},{rank},{mark}")
    failed, shown = False, ""
    try:
        strategy = f"strategy={name.partition(',')[0]}"
        run(strategy, *RECIPE, *overrides, world_size=ranks, directory=folder, timeout_s=patience(SOON_S))
    except TimeoutError:
        raise
    except Exception as error:
        failed, shown = True, str(error)
    assert failed == mark.exists(), shown  # some ranks have no loss, say, or never call an optimizer
    said = json.loads((folder / "summary.json").read_text())
    assert said["status"] == ("failed" if failed else "finished")
    if failed:
        for text in (shown, said["error"]):
            assert f": the cat sat on the keyboard in {place}" in text
        assert said["error"].startswith(f"rank {rank}: RuntimeError")
        trace = (folder / "ranks" / f"rank_{rank}.txt").read_text()
        assert "raising_parts.py" in trace
        assert "the cat saw a mouse" in trace  # what it came of
        assert "failed to run forward" not in trace  # torch's words, in its place


@pytest.mark.slow
def test_an_exception_in_a_stage_is_what_the_command_shows_first(python: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = subprocess.run(
        [
            *(python, "-m", "ddp_recipes", *QUICK, *RECIPE, "strategy=ddp_pipeline", "strategy.stages=3"),
            *("launcher.nproc_per_node=3", f"hydra.run.dir={folder}"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "RAISES": f"backward,1,{tmp_path / 'raised'}"},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Rank 1 failed:\nTraceback (most recent call last):\n"), ended.stderr
    assert ended.stderr.rstrip().endswith("RuntimeError: the cat sat on the keyboard in backward")
    assert ended.stderr.count("Traceback") == 2  # with what it came of, and nothing of other ranks
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


EXTRA = ["model._target_=own_parts.Extra", "checkpoint=none"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_without_a_digest_are_refused_at_the_start(ranks: int, run: Run, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"Extra has _extra_state, which is a ndarray.*\(torch\.from_numpy"):
        run(*EXTRA, "+model.after=0", world_size=ranks, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_that_lose_their_digest_do_not_fail_a_run_at_its_end(run: Run) -> None:
    assert run(*EXTRA, "+model.after=3")["weights_sha256"] is None


@pytest.mark.parametrize("save", [[], ["checkpoint=default", "checkpoint.every_n_steps=4"]], ids=["step", "save"])
def test_what_fails_while_weights_have_no_digest_is_shown(save: list[str], run: Run, tmp_path: Path) -> None:
    words = "ndarray cannot be in a checkpoint" if save else "the cat sat on the keyboard"
    with pytest.raises(RuntimeError, match=words):
        run(*EXTRA, "+model.after=3", "+model.raises=true", *save, directory=tmp_path / "run")
    said = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (said["status"], words in said["error"]) == ("failed", True)


def test_a_loss_that_is_a_sum_is_named(run: Run, tmp_path: Path) -> None:
    run("+task.loss.reduction=sum", "trainer.max_steps=1", directory=tmp_path / "run")
    assert "task.loss has reduction=sum" in (tmp_path / "run" / "train.log").read_text()


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_errors_are_walked_once_wherever_they_lead() -> None:
    first, second, third = ValueError("first"), KeyError("second"), Mute()
    first.__cause__, second.__context__, second.__cause__ = second, first, third
    third.__context__ = third
    assert [*chain(first)] == [first, second, third]
    assert disk_failure(first, Path("/")) is None
    assert not timed_out(third)
    assert not out_of_memory(third)


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        ("no runtime output", False),
        ("Timed out waiting 3000ms for recv operation to complete", True),
        ("wait timeout after 300ms, keys: /default_pg", True),
        ("Socket Timeout", True),
        ("recvValueWithTimeout failed on 3", True),
        ("the client socket has timed-out", True),
    ],
)
def test_timeouts_are_told_by_their_words(words: str, is_one: bool) -> None:
    assert timed_out(RuntimeError(words)) == is_one
