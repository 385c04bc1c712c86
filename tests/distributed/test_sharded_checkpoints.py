"""Checkpoints of a sharded model: any strategy goes on from them as from a whole one's, and the other way round."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.checkpointing.files import newest_first
from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.tensors import digest, put_together
from helpers.exact import QUIET
from helpers.marks import slow_but

Run = Callable[..., Summary]

COMMON = [*QUIET, "checkpoint=default", "optimizer=adamw", "optimizer.lr=0.01", "data.num_samples=48"]
COMMON += ["data.global_batch_size=12"]
EXACT = ["strategy=ddp_exact", "strategy.shards=4"]
FSDP = ["strategy=fsdp", "strategy.shards=4", "strategy.wrap=[net1,net2]"]
OTHERS = {  # who goes on: overrides and processes
    "single": (["strategy=single"], 1),
    "ddp": (["strategy=ddp"], 2),
    "ddp_exact": (EXACT, 2),
    "ddp_pipeline": (["strategy=ddp_pipeline", "strategy.micro_batches=2"], 2),
    "fsdp, unordered": (["strategy=fsdp", "strategy.wrap=[net1,net2]"], 2),
    "fsdp, replicas": ([*FSDP, "strategy.replicas=2"], 4),
}


def content(directory: Path | str) -> dict[str, Any]:
    """Return what the last checkpoint holds, but for what depends on how many ranks there were."""
    state: dict[str, Any] = put_together(load(newest_first(Path(directory) / "checkpoints")[0]))
    return {name: state[name] for name in ("model", "optimizer", "scheduler", "callbacks", "cursor")}


@pytest.fixture
def both(run: Run) -> tuple[str, str]:
    """The run directories of a whole and of a sharded model, after the same steps."""
    limit = "trainer.max_steps=3"
    whole = run(*COMMON, *EXACT, limit, "callbacks=ema", world_size=1)["run_directory"]
    sharded = run(*COMMON, *FSDP, limit, "callbacks=ema", world_size=2)["run_directory"]
    return whole, sharded


def test_they_hold_the_same(both: tuple[str, str]) -> None:
    whole, sharded = both
    assert digest(content(sharded)) == digest(content(whole))
    assert not [*Path(whole, "checkpoints").glob("step_*-*")]
    assert [path.name for path in sorted(Path(sharded, "checkpoints").glob("step_*-*/*"))] == [
        "rank_0_of_2.safetensors",
        "rank_1_of_2.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["ddp_exact"], OTHERS))
def test_all_go_on_from_one_as_from_the_other_and_back(name: str, both: tuple[str, str], run: Run) -> None:
    own, size = OTHERS[name]

    def go_on(directory: str, steps: int, own: list[str], ranks: int) -> Summary:
        limits = [f"trainer.max_steps={steps}", "resume.strict=false"]
        return run(*COMMON, *own, f"ckpt_path={directory}", *limits, world_size=ranks)

    ends = []
    for directory in both:
        there = go_on(directory, 5, own, size)
        back = [go_on(there["run_directory"], 6, EXACT, 1), go_on(there["run_directory"], 6, FSDP, 4)]
        assert back[0]["weights_sha256"] == back[1]["weights_sha256"]
        assert back[0]["global_step"] == 6
        ends.append((digest(content(there["run_directory"])), back[0]["weights_sha256"]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("ranks", slow_but([2], [2, 4]))  # as many as wrote it, which keep what they verify, and others
def test_a_flipped_bit_is_found_and_the_one_before_used_to_the_bit(ranks: int, run: Run, tmp_path: Path) -> None:
    expected = run(*COMMON, *FSDP, "trainer.max_steps=5", world_size=2)["weights_sha256"]
    folder = tmp_path / "damaged"
    run(*COMMON, *FSDP, "checkpoint.every_n_steps=1", "trainer.max_steps=3", world_size=2, directory=folder)
    go_on = partial(run, *COMMON, *FSDP, "ckpt_path=auto", "trainer.max_steps=5", world_size=ranks, directory=folder)
    flip(folder, step=3)
    flip(folder, step=2)
    reason = "rank_1_of_2.safetensors, which rank 1 wrote, does not match its checksum"
    with pytest.raises(RequestError, match=f"Every checkpoint in .* is damaged:(\n.*{reason}){{2}}") as error:
        go_on()
    assert error.value.exit_status == 2
    flip(folder, step=2)
    assert go_on()["weights_sha256"] == expected
    log = (folder / "train.log").read_text()
    assert re.search(f"step_00000003.json is damaged: .*{reason}. .*step_00000002.json is used instead", log)


def flip(folder: Path, step: int) -> None:
    """Change a bit in the middle of rank 1's part of a checkpoint, or change it back."""
    (path,) = folder.glob(f"checkpoints/step_{step:08d}-*/rank_1_of_2.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
