"""The files that a page of docs/ shows, and commands in a folder that holds nothing else."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.patience import patience

DOCS = Path(__file__).parents[2] / "docs"
FILE = re.compile(r"^```(?:python|yaml)\n# ([\w./]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# One process makes all requests, one after the other, as the command line does.
REQUESTS = """
import contextlib, io, json, sys
from ddp_recipes.main import main

found = {}
for name, overrides in json.load(sys.stdin).items():
    sys.argv[1:] = overrides
    code = None
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as exit:
            code = exit.code
    found[name] = [code, err.getvalue()]
print(json.dumps(found))
"""


def unpack(page: str, folder: Path) -> None:
    """Write the files that a page shows into a folder."""
    for name, text in FILE.findall((DOCS / page).read_text(encoding="utf-8")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def ran(python: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ddp_recipes`` with the groups of the page."""
    command = [python, "-m", "ddp_recipes", "--config-dir=my_conf", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patience(120), check=False)


def requested(python: str, folder: Path, cases: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, str]]:
    """Make requests that need no torch; return exit code and standard error of each, by name."""
    text = json.dumps({name: ["--config-dir=my_conf", *overrides] for name, overrides in cases.items()})
    command = [python, "-c", REQUESTS]
    done = subprocess.run(
        command, cwd=folder, input=text, capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: (code, err) for name, (code, err) in json.loads(done.stdout.splitlines()[-1]).items()}
