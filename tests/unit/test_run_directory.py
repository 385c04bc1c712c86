"""What is written into a run directory is complete, valid, and not taken from another run."""

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.controller import make_directory, remove_empty
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import (
    RunDirectory,
    leave_failure,
    leave_summary,
    refuse_used,
    write_summary,
)


def read(directory: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    values: dict[str, Any] = json.loads((directory / "summary.json").read_text(), parse_constant=refuse)
    return values


def test_a_summary_is_valid_json_also_when_a_metric_is_no_number(tmp_path: Path) -> None:
    write_summary(tmp_path, {"status": "finished", "metrics": {"val/loss": float("nan"), "lr": 0.1, "n": float("inf")}})
    assert read(tmp_path)["metrics"] == {"val/loss": None, "lr": 0.1, "n": None}


def test_a_directory_with_a_run_is_refused_unless_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(RequestError, match="already holds a run"):
        refuse_used(tmp_path, resumed=False)
    refuse_used(tmp_path, resumed=True)


def test_the_folder_of_own_modules_is_refused_for_no_later_run_would_import_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model.py").touch()
    RunDirectory(tmp_path, resumed=False).close()  # a copy, perhaps: the modules are imported from elsewhere
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RequestError, match=r"is where your own modules are \(my_model\.py\)"):
        RunDirectory(tmp_path, resumed=False)
    RunDirectory(tmp_path / "run", resumed=False).close()


def test_a_directory_has_one_writer_at_a_time(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run", resumed=False)
    with pytest.raises(RequestError, match="in use by a run that is still going"):
        RunDirectory(tmp_path / "run", resumed=True)
    first.close()
    RunDirectory(tmp_path / "run", resumed=True).close()


def test_only_what_was_made_and_stayed_empty_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "today" / "now"
    _, *made = make_directory(run, fresh=False)
    assert made == [run, run.parent, run.parents[1]]
    assert make_directory(run, fresh=False) == [run]  # a second one has made nothing, and removes nothing
    remove_empty(made)
    assert not (tmp_path / "outputs").exists()
    assert tmp_path.exists()

    _, *made = make_directory(run, fresh=True)
    (tmp_path / "outputs" / "kept.txt").touch()
    remove_empty(made)
    assert (tmp_path / "outputs" / "kept.txt").exists()
    assert not (tmp_path / "outputs" / "today").exists()


def test_a_failure_is_recorded_for_a_run_that_began_and_for_no_other(tmp_path: Path) -> None:
    leave_failure(tmp_path, [], "rank 1 was killed")
    assert not (tmp_path / "summary.json").exists()
    (tmp_path / "config.yaml").touch()
    leave_failure(tmp_path, ["seed=1"], "rank 1 was killed")
    assert read(tmp_path) == {"status": "failed", "error": "rank 1 was killed", "overrides": ["seed=1"]}


def test_what_rank_0_wrote_stays_unless_the_launcher_knows_better(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    write_summary(tmp_path, {"status": "failed", "error": "connection closed", "global_step": 7})
    leave_summary(tmp_path, "rank 1 was killed", [])
    assert read(tmp_path)["error"] == "connection closed"
    leave_summary(tmp_path, "rank 1 was killed", [], known_better=True)
    assert read(tmp_path) == {"status": "failed", "error": "rank 1 was killed", "global_step": 7}
