"""What runs instead of training: a module or folder a command, which is imported when it is asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

_COMMANDS = {  # by the values of plan, check and tune
    "plan": "ddp_recipes.tools.dry_run:plan",
    "equivalence": "ddp_recipes.tools.equivalence:equivalence",
    "lr": "ddp_recipes.tools.learning_rate:tune",
    "batch_size": "ddp_recipes.tools.batch_size:tune",
}


def command(name: str) -> Callable[[Any, Any], None]:
    """Return what takes a run's recipe and output, and does the work that was asked for by name."""
    module, _, function = _COMMANDS[name].partition(":")
    found: Callable[[Any, Any], None] = getattr(import_module(module), function)
    return found
