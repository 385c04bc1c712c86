"""Any damage to any file of a checkpoint, with any strategy: the newest whole one is used, loudly, to the same bits."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.checkpointing.files import named, newest_first, step_files
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from helpers.damage import DAMAGE, IN_PLACE, copied
from helpers.exact import QUIET
from helpers.marks import slow_but
from helpers.pairs import pairwise

Run = Callable[..., Summary]

SEED = 41
COMMON = [*QUIET, "checkpoint=default", "checkpoint.every_n_steps=2", "checkpoint.save_top_k=-1", "optimizer=adamw"]
COMMON += ["data.num_samples=48", "data.global_batch_size=8"]
STRATEGIES = {  # overrides, and numbers of ranks that give the same bits
    "fsdp": (["strategy=fsdp", "strategy.shards=4", "strategy.wrap=[net1,net2]"], (2, 4)),
    "ddp_exact": (["strategy=ddp_exact", "strategy.shards=4"], (2, 1)),
    "ddp_pipeline": (["strategy=ddp_pipeline", "strategy.micro_batches=2"], (2, 2)),
}
CASES = pairwise(
    {
        "strategy": [*STRATEGIES],
        "async_save": [False, True],
        "damage": [*DAMAGE],
        "where": ["newest", "last", "part 0", "part 1"],
        "ranks": [0, 1],
        "path": ["auto", "directory", "file"],
    },
    SEED,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are kept from case to case."""
    return tmp_path_factory.mktemp("runs")


def kept(case: dict[str, Any], folder: Path, run: Run) -> tuple[Path, str]:
    """Return the directory of a run of four steps, and the weights of one that went on to six."""
    own, _ = STRATEGIES[case["strategy"]]
    name = f"{case['strategy']}_{case['async_save']}"
    overrides = [*COMMON, *own, f"checkpoint.async_save={case['async_save']}"]
    if not (folder / name).exists():
        run(*overrides, "trainer.max_steps=4", world_size=2, directory=folder / name)
        whole = run(*overrides, "trainer.max_steps=6", world_size=2, directory=folder / f"{name}_whole")
        (folder / f"{name}.sha256").write_text(str(whole["weights_sha256"]))
    return folder / name, (folder / f"{name}.sha256").read_text()


def damaged(case: dict[str, Any], directory: Path) -> tuple[Path, bool]:
    """Damage a file; return its checkpoint's path, and whether the newest state is lost with it."""
    checkpoints, damage = directory / "checkpoints", DAMAGE[case["damage"]]
    newest = step_files(checkpoints)[4]
    parts = sorted(checkpoints.glob("step_00000004-*/*"))
    if case["where"] == "last":
        path = named(checkpoints, "last")
        shutil.copy(path, checkpoints / "aside")
        os.replace(checkpoints / "aside", path)  # a file of its own
        damage(path)
        return path, False
    if case["where"].startswith("part") and parts:
        damage(parts[int(case["where"][-1])])
        return newest, True
    damage(newest)
    return newest, case["damage"] in IN_PLACE


@pytest.mark.parametrize("number", slow_but([0], range(len(CASES))))
def test_what_is_damaged_is_refused_or_passed_over(number: int, folder: Path, run: Run, tmp_path: Path) -> None:
    case = CASES[number]
    own, ranks = STRATEGIES[case["strategy"]]
    whole, expected = kept(case, folder, run)
    directory = copied(whole, tmp_path / "run")
    newest = step_files(directory / "checkpoints")[4]
    bad, lost = damaged(case, directory)
    path = {"auto": "auto", "directory": str(directory), "file": str(newest)}[case["path"]]

    def go_on() -> Summary:
        overrides = [*COMMON, *own, f"checkpoint.async_save={case['async_save']}", "trainer.max_steps=6"]
        there = directory if case["path"] == "auto" else tmp_path / "other"
        return run(*overrides, f"ckpt_path={path}", world_size=ranks[case["ranks"]], directory=there)

    if case["path"] == "file" and bad == newest:
        with pytest.raises(RequestError, match=newest.name):
            go_on()
        return
    if bad.is_dir() and bad.stem == "last" and case["path"] == "auto":
        with pytest.raises(RequestError, match=r"last.(pt|json) is a folder, in whose place checkpoints are named"):
            go_on()
        return
    summary = go_on()
    assert summary["weights_sha256"] == expected, case
    log = Path(summary["run_directory"], "train.log").read_text()
    assert (
        f"{newest} is damaged: " in log and f"{newest.with_stem('step_00000002')} is used instead" in log
    ) == lost, case
    checkpoints = Path(summary["run_directory"], "checkpoints")
    assert load(named(checkpoints, "last"))["cursor"]["step"] == 6
    assert newest_first(checkpoints)[0].stem == "step_00000006"
