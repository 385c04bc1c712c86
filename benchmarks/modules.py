"""The core and its extras: how many lines each has, and what of both a run loads.

    python -m benchmarks.modules [overrides of the run, in place of a default one on two ranks]

An extra is what most runs have no need of. It is loaded by those that name it, and by no other; this shows where that
does not hold yet. Lines are all lines of a module's file.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "ddp_recipes"
EXTRAS = {  # the longest name that a module begins with tells what it is of
    "fsdp": "strategies.fsdp",
    "ddp_exact": "strategies.ddp_exact",
    "ddp_pipeline": "strategies.ddp_pipeline model_parallel.pipeline model_parallel.cut model_parallel.timeline",
    "parameter_server": "strategies.parameter_server",
    "dp": "strategies.dp",
    "model parallel": "model_parallel build.splitting reporting.figures.split reporting.figures.schedule "
    "reporting.figures.stages",
    "deferred models": "build.deferred build.tape build.filling",
    "recomputation": "build.recomputation",
    "sharded checkpoints": "checkpointing.sharded",
    "slurm": "launchers.slurm",
    "nodes": "launchers.nodes",
    "recovery": "recovery launchers.keeper launchers.elastic launchers.local.replacement",
    "dry run": "tools.dry_run",
    "equivalence": "tools.equivalence tools.counters",
    "tune": "tools.batch_size tools.learning_rate reporting.figures.learning_rates",
    "profile": "tools.profiling reporting.figures.profile",
    "export, predict": "checkpointing.export training.predictions",
    "report": "tools.report",
    "sweeps": "reporting.sweep",
    "lightning": "lightning",
    "wandb": "loggers.wandb",
    "mlflow": "loggers.mlflow",
    "callbacks": "callbacks.accumulation callbacks.early_stopping callbacks.ema callbacks.learning_rate "
    "callbacks.samples callbacks.summary callbacks.text",
    "fast paths": "runtime.fast_paths strategies.ddp.shared_memory checkpointing.staging",
    "socket guards": "runtime.doors",
    "models, data sets, tasks": "models datasets tasks.language_modeling tasks.model_loss reporting.figures.matrix",
    "template, testing": "template testing project",
}
SPY = """
import json, os, sys
from pathlib import Path
from ddp_recipes import Callback

class Spy(Callback):
    def on_end(self):
        Path(os.environ["SEEN"], os.environ.get("RANK", "0")).write_text(json.dumps(sorted(sys.modules)))
"""


def lines() -> dict[str, int]:
    """Return the number of lines of each module."""
    files = {path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / PACKAGE).rglob("*.py")}
    return {
        ".".join(path.parts).removesuffix(".__init__"): file.read_text().count("\n") for path, file in files.items()
    }


def part_of(module: str) -> str:
    """Return which extra a module is of; ``core`` if of none."""
    found = [
        (len(prefix), name)
        for name, prefixes in EXTRAS.items()
        for prefix in prefixes.split()
        if f"{module}.".startswith(f"{PACKAGE}.{prefix}.")
    ]
    return max(found)[1] if found else "core"


def loaded(overrides: Sequence[str]) -> list[str]:
    """Return the modules of this package that rank 0 of a run has loaded when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "spy.py").write_text(SPY)
        command = [sys.executable, "-m", PACKAGE, "+callbacks.spy._target_=spy.Spy", *overrides]
        environment = {"PYTHONPATH": f"{ROOT}:{folder}", "SEEN": folder, "PATH": "/usr/bin:/bin"}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        seen = json.loads(Path(folder, "0").read_text())
    return [name for name in seen if f"{name}.".startswith(f"{PACKAGE}.")]


def main(overrides: Sequence[str]) -> None:
    """Print a row a part."""
    default = ["strategy=ddp", "launcher.nproc_per_node=2", "launcher.device=cpu", "trainer.max_epochs=1"]
    every, seen = lines(), loaded(overrides or default)
    print("| part | modules | lines | loaded: modules | lines |\n| --- | ---: | ---: | ---: | ---: |")
    total = [0, 0, 0, 0]
    for part in ("core", *EXTRAS):
        own = [name for name in every if part_of(name) == part]
        here = [name for name in own if name in seen]
        row = [len(own), sum(every[name] for name in own), len(here), sum(every[name] for name in here)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        print(f"| {part} | {' | '.join(f'{number:,}' for number in row)} |")
    print(f"| all | {' | '.join(f'{number:,}' for number in total)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
