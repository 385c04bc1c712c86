"""The recipe trains, on two real processes: each test takes a second or two."""

from pathlib import Path

from ddp_recipes.testing import run_recipe

CONF = str(Path(__file__).parents[1] / "conf")


def test_two_ranks_learn(tmp_path: Path) -> None:
    overrides = ["logger=none", "trainer.progress=false", "launcher.device=cpu"]
    summary = run_recipe(overrides, 2, tmp_path / "run", config_dir=CONF, config_name="config")
    assert summary["world_size"] == 2
    assert summary["metrics"]["val/accuracy"] > 0.9
