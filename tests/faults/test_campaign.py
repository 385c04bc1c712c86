"""A short fault campaign: runs that are disturbed at random finish unaided, as if nothing had been done to them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "faults.py"
# With this seed every kind of fault is done to one of the runs at least, at as little cost as many seeds allow.
SHORT = ["--runs=9,3", "--seed=1874", "--mode=both", "--most=3", "--sizes=1,2"]
IN_PARTS = ["--strategy=fsdp", "--saves", "--runs=3", "--seed=2", "--mode=local", "--most=2", "--sizes=2,3", "--jobs=2"]

REPLACED = ["--mode=replace", "--runs=2", "--seed=9", "--most=3", "--sizes=2,3", "--without=stop_rank", "--jobs=2"]
RESUMED = ["--mode=replace", "--resume", "--strategy=ddp_pipeline", "--runs=2", "--seed=1", "--most=2", "--sizes=4"]


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("options", "runs"),
    [
        pytest.param(SHORT, 12, id="any fault", marks=pytest.mark.nightly),
        pytest.param(IN_PARTS, 3, id="sharded saves", marks=pytest.mark.nightly),
        pytest.param(RESUMED, 2, id="ranks of resumed pipelines replaced", marks=pytest.mark.nightly),
        pytest.param(REPLACED, 2, id="ranks replaced", marks=pytest.mark.nightly),
    ],
)
def test_runs_that_are_disturbed_at_random_all_finish_as_if_they_had_not_been(
    options: list[str], runs: int, tmp_path: Path
) -> None:
    record = tmp_path / "faults.json"
    ended = subprocess.run(
        [sys.executable, str(CAMPAIGN), *options, f"--out={record}"], capture_output=True, text=True, cwd=tmp_path
    )
    assert record.exists(), ended.stdout + ended.stderr
    verdicts = [run["verdict"] for run in json.loads(record.read_text())["runs"]]
    assert len(verdicts) == runs
    flaws = [verdict["flaws"] for verdict in verdicts]
    assert all(verdict["finished"] for verdict in verdicts), flaws
    assert all(verdict["identical"] for verdict in verdicts), flaws
    # What takes how long, and who is named, is for the campaign to count: here other work may be on the machine.
    for count in ("twice", "missing", "differing", "orphans", "pickled"):
        assert not any(verdict[count] for verdict in verdicts), flaws
    for verdict in verdicts:
        assert all(lost <= allowed for lost, allowed in zip(verdict["lost"], verdict["allowed"], strict=True)), flaws
