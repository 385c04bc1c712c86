"""``ddp-recipes init my_project``: a small project that runs. Loads no torch."""

import keyword
import re
import shlex
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ddp_recipes.errors import RequestError

TEMPLATE = Path(__file__).parent / "template"
NAME = "my_project"  # of the template's package, and in its texts


def init(arguments: Sequence[str]) -> None:
    """Write the project's files, and print what to do with them.

    Raises:
        RequestError: the folder cannot be written, is not empty, or its name is none of a Python package.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise RequestError(f"ddp-recipes init takes the folder of the new project, as in: ddp-recipes init {NAME}")
    folder = Path(arguments[0])
    package = re.sub(r"[-. ]", "_", folder.absolute().name.lower())
    if not package.isidentifier() or keyword.iskeyword(package):
        raise RequestError(f"{folder}: no package can be called {package}. Give a folder whose name is letters and _.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} is there and is not empty, and nothing is overwritten. Give a new folder.")
    if (found := find_spec(package)) is not None and found.origin is not None:  # an empty folder here has none
        raise RequestError(f"{folder}: there is a package {package} already, which Python would import instead.")
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / NAME).rename(folder / package)
        for path in filter(Path.is_file, folder.rglob("*")):
            path.write_text(path.read_text(encoding="utf-8").replace(NAME, package), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error.strerror}. Give another folder.") from None
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        print(f"  {path}")
    print(f"\nNow:\n  cd {shlex.quote(str(folder))}\n  python train.py\nREADME.md there says what comes next.")
