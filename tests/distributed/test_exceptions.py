"""An exception anywhere, with any strategy, on any rank: it is shown, soon, and the run is called failed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_recipes.reporting.run_directory import Summary
from helpers.marks import slow_but
from helpers.patience import patience

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
CASES = [(name, place, rank) for name, (ranks, _) in STRATEGIES.items() for place in PLACES for rank in range(ranks)]


@pytest.mark.parametrize(
    ("name", "place", "rank"),
    slow_but(
        [("ddp_pipeline", "forward", 1), ("ddp", "save", 0)],
        CASES,
        daily=[
            case for number, case in enumerate(CASES) if number % 8 == 0 or case[:2] == ("ddp_pipeline", "backward")
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
