"""What runs instead of training: a module or folder a command, which is imported when it is asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# Commands by the first argument of ddp-recipes.
BEFORE_CONFIG = {
    "index": "ddp_recipes.streams.commands:index",
    "init": "ddp_recipes.project:init",
    "pack": "ddp_recipes.streams.commands:pack",
    "report": "ddp_recipes.tools.report:report",
}
_COMMANDS = BEFORE_CONFIG | {  # by the values of plan, check and tune
    "plan": "ddp_recipes.tools.dry_run:plan",
    "equivalence": "ddp_recipes.tools.equivalence:equivalence",
    "lr": "ddp_recipes.tools.learning_rate:tune",
    "batch_size": "ddp_recipes.tools.batch_size:tune",
}


def command(name: str) -> Callable[..., Any]:
    """Return what does the work that was asked for by name.

    It takes a run's recipe and output or, if the name is among :data:`BEFORE_CONFIG`, the arguments behind it.
    """
    module, _, function = _COMMANDS[name].partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
