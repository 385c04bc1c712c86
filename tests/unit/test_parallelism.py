"""What strategies declare of a run: processes, shards, keys and refusals, asked of their settings without torch."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes import strategies
from ddp_recipes._lazy import published
from ddp_recipes.config.parallelism import BatchShards, StrategySettings, strategy_settings
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World
from helpers.patience import patience

SETTINGS = {*strategies.__all__, *published("ddp_recipes.strategies")}
SHIPPED = sorted(name.removesuffix("Settings") for name in SETTINGS if name.endswith("Settings"))


def settings(name: str, **keys: Any) -> StrategySettings:
    return strategy_settings({"_target_": f"ddp_recipes.strategies.{name}", **keys})


@pytest.mark.parametrize("name", SHIPPED)
def test_settings_fit_the_yaml(name: str) -> None:
    found = settings(name)
    assert found.name
    assert "processes" in {field.name for field in fields(found)}


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("DDPExact", {"num_threads": "two"}, r"strategy\.num_threads=two is not allowed\. Allowed: a whole number"),
        ("DDP", {"shared_memory": "no"}, r"strategy\.shared_memory=no is not allowed\. Allowed: true, false"),
        ("DDP", {"comm_hook": "fp8"}, r"strategy\.comm_hook=fp8 is not allowed\. Allowed: fp16, bf16, powersgd"),
        ("DDP", {"static_grap": True}, r"strategy\.static_grap is not a key.* Did you mean 'static_graph'\?"),
        ("Single", {"shards": 3}, r"strategy\.shards is not a key"),
        ("DDPPipeline", {"stages": 1}, r"strategy\.stages=1 is not allowed"),
    ],
)
def test_keys_of_a_strategy_are_checked(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        settings(name, **keys)


@pytest.mark.parametrize(
    ("name", "keys", "allowed", "refused"),
    [
        ("Single", {}, [1], [2]),
        ("Single", {"processes": None}, [1], [2]),
        ("Single", {"processes": 3}, [], [1, 3]),
        ("DataParallel", {}, [1], [2]),
        ("DDP", {}, [1, 2, 7], []),
        ("DDP", {"processes": 3}, [3], [1, 2]),
        ("DDPExact", {}, [1, 2, 3, 4, 6, 12], [5, 8]),
        ("FSDP", {"replicas": 3}, [6, 9], [1, 3, 4]),
        ("DDPPipeline", {}, [2, 4], [1, 3]),
        ("DDPPipeline", {"stages": 4, "schedule": "interleaved_1f1b"}, [2, 4], [1, 3]),
    ],
)
def test_world_sizes_of_a_strategy(name: str, keys: dict[str, Any], allowed: list[int], refused: list[int]) -> None:
    found = settings(name, **keys)
    for size in allowed:
        found.check_world_size(size)
    for size in refused:
        with pytest.raises(RequestError, match="process"):
            found.check_world_size(size)


@pytest.mark.parametrize(
    ("name", "keys", "shards"),
    [
        ("Single", {}, [BatchShards(0, 1, 1)]),
        ("DDP", {}, [BatchShards(rank, 1, 4) for rank in range(4)]),
        ("DDPExact", {}, [BatchShards(rank, 3, 12) for rank in range(4)]),
        ("FSDP", {}, [BatchShards(rank, 1, 4) for rank in range(4)]),
        ("FSDP", {"shards": 8, "replicas": 2}, [BatchShards(rank, 2, 8) for rank in range(4)]),
        ("DDPPipeline", {}, [BatchShards(rank // 2, 1, 2) for rank in range(4)]),
    ],
)
def test_shards_of_a_batch_are_dealt_by_the_strategy(
    name: str, keys: dict[str, Any], shards: list[BatchShards]
) -> None:
    found = settings(name, **keys)
    assert [found.batch_shards(World(rank, len(shards))) for rank in range(len(shards))] == shards


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module.Strategy", "there is no module no_such_module"),
        ("ddp_recipes.strategies.DPD", "has no DPD. It has: DDP, "),
        ("torch.nn.Linear", "has no settings. Define LinearSettings"),
        (None, "strategy has no _target_"),
    ],
)
def test_what_is_no_strategy_is_refused(target: str | None, message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        strategy_settings({"_target_": target})
    assert message in str(refusal.value)


@pytest.mark.spawn
def test_settings_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from ddp_recipes.config.parallelism import strategy_settings as of\n"
        f"for name in {SHIPPED}: of({{'_target_': 'ddp_recipes.strategies.' + name}})\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stderr
