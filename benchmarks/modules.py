"""The core and its extras: how many lines each has, and what of both a run loads.

    python -m benchmarks.modules [overrides of the run, in place of a default one on two ranks]

An extra is what most runs have no need of: `.ci/extras.toml` lists them. It is loaded by those that name it, and by no
other; this shows where that does not hold yet. Lines are all lines of a module's file.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.extras import CORE, PACKAGE, ROOT, part_of, parts

SOURCE = ROOT / "src"
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
    files = {path.relative_to(SOURCE).with_suffix(""): path for path in (SOURCE / PACKAGE).rglob("*.py")}
    return {
        ".".join(path.parts).removesuffix(".__init__"): file.read_text().count("\n") for path, file in files.items()
    }


def loaded(overrides: Sequence[str]) -> list[str]:
    """Return the modules of this package that rank 0 of a run has loaded when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "spy.py").write_text(SPY)
        command = [sys.executable, "-m", PACKAGE, "+callbacks.spy._target_=spy.Spy", *overrides]
        environment = {"PYTHONPATH": f"{SOURCE}:{folder}", "SEEN": folder, "PATH": "/usr/bin:/bin"}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        seen = json.loads(Path(folder, "0").read_text())
    return [name for name in seen if f"{name}.".startswith(f"{PACKAGE}.")]


def main(overrides: Sequence[str]) -> None:
    """Print a row a part."""
    default = ["strategy=ddp", "launcher.nproc_per_node=2", "launcher.device=cpu", "trainer.max_epochs=1"]
    every, seen = lines(), loaded(overrides or default)
    print("| part | modules | lines | loaded: modules | lines |\n| --- | ---: | ---: | ---: | ---: |")
    total = [0, 0, 0, 0]
    for part in (CORE, *parts()):
        own = [name for name in every if part_of(name) == part]
        here = [name for name in own if name in seen]
        row = [len(own), sum(every[name] for name in own), len(here), sum(every[name] for name in here)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        print(f"| {part} | {' | '.join(f'{number:,}' for number in row)} |")
    print(f"| all | {' | '.join(f'{number:,}' for number in total)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
