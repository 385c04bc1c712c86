"""Train the projects with ``lightning.Trainer`` and with ddp_recipes; print what came out as JSON."""

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning_projects as projects
import torch

EPOCHS = 3
CASES: dict[str, dict[str, Any]] = {
    "Classifier": {},
    "Autoencoder": {"accumulate_grad_batches": 2},
    "Adversaries": {},
    "FineTuned": {"callbacks": ["Unfreeze"]},
    "Language": {},
    "Two": {},
    "Recorded": {},
}


def of_lightning(name: str, folder: Path) -> dict[str, Any]:
    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = dict(CASES[name])
    options["callbacks"] = [getattr(projects, each)() for each in options.get("callbacks", ())]
    module = getattr(projects, name)(*([str(calls(folder, "lightning"))] if name == "Recorded" else []))
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=2,
        **options,
    )
    trainer.fit(module, datamodule=None if name == "Two" else projects.PointsData())
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    if name == "Classifier":
        metrics |= trainer.test(module, datamodule=projects.PointsData(), verbose=False)[0]
    if name == "Recorded":
        for work in (trainer.validate, trainer.test, trainer.predict):
            module.calls.clear()
            work(module, datamodule=projects.PointsData())
    return {"metrics": metrics, "weights": summary(module.state_dict())}


def of_ours(name: str, folder: Path, world_size: int, directory: str = "", *more: str) -> dict[str, Any]:
    import ddp_recipes

    options = dict(CASES[name])
    (folder / "conf" / "model").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "model" / "project.yaml").write_text(f"_target_: lightning_projects.{name}\n")
    overrides = [
        f"--config-dir={folder}/conf",
        "task=lightning",
        "model=project",
        "data=lightning",
        "data.global_batch_size=16",
        f"launcher.nproc_per_node={world_size}",
        f"trainer.max_epochs={EPOCHS}",
        "trainer.log_every_n_steps=1",
        "trainer.progress=false",
        "logger=none",
        f"hydra.run.dir={folder}/{directory or f'{name}_{world_size}'}",
        *more,
    ]
    if name != "Two":
        overrides.append("data.datamodule._target_=lightning_projects.PointsData")
    if name != "Two" and world_size == 2 and not directory:
        overrides.append(f"+data.datamodule.folder={folder}")
    if name == "Recorded":
        overrides.append(f"+model.folder={calls(folder, 'ours')}")
    overrides += [f"+callbacks.{each}._target_=lightning_projects.{each}" for each in options.pop("callbacks", ())]
    overrides += [f"trainer.{key}={value}" for key, value in options.items()]
    found = ddp_recipes.run(overrides)
    metrics = dict(found["metrics"])
    state = torch.load(found["last_checkpoint"], weights_only=True)["model"]
    modes = {} if directory else {"Classifier": ["test"], "Recorded": ["validate", "test", "predict"]}
    for mode in modes.get(name, ()):
        again = [each for each in overrides if not each.startswith("hydra")]
        again += [
            f"mode={mode}",
            f"ckpt_path={found['run_directory']}",
            f"hydra.run.dir={folder}/{mode}_{name}_{world_size}",
        ]
        metrics |= ddp_recipes.run(again)["metrics"]
    return {"metrics": metrics, "weights": summary(state)}


def calls(folder: Path, who: str) -> Path:
    """Return where a module writes which of its hooks were called."""
    (folder / f"calls_{who}").mkdir(exist_ok=True)
    return folder / f"calls_{who}"


def summary(state: dict[str, Any]) -> dict[str, list[float]]:
    return {
        name: [value.double().sum().item(), value.double().norm().item()]
        for name, value in state.items()
        if value.is_floating_point()
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    who, folder = sys.argv[1], Path(sys.argv[2])
    if who == "lightning":
        found = {name: of_lightning(name, folder) for name in CASES}
    elif who == "resumed":  # in the middle of the second of three epochs, at another world size
        names = ["Classifier", "Autoencoder"]
        for name in names:
            steps = 6 // CASES[name].get("accumulate_grad_batches", 1)
            of_ours(name, folder, 2, f"{name}_resumed", f"trainer.max_steps={steps}")
        found = {name: of_ours(name, folder, 1, f"{name}_resumed", "ckpt_path=auto") for name in names}
    else:
        found = {name: of_ours(name, folder, int(who)) for name in CASES if name != "Recorded" or who == "1"}
    (folder / f"{who}.json").write_text(json.dumps(found))
