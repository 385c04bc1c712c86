"""The callbacks of a run."""

from collections.abc import Mapping
from typing import Any

from ddp_recipes.build.instantiate import make
from ddp_recipes.callbacks import Callback
from ddp_recipes.errors import RequestError
from ddp_recipes.tasks import Task


def make_callbacks(nodes: Mapping[str, Any], task: Task) -> dict[str, Callback]:
    """Return the callbacks of the config's section, by name; the task may know others than ours.

    Raises:
        RequestError: one cannot be made, or is no callback.
    """
    callbacks = {}
    for name, node in nodes.items():
        made = make(node, f"callbacks.{name}")
        callback = made if isinstance(made, Callback) else task.callback(name, made)
        if callback is None:
            raise RequestError(
                f"callbacks.{name} makes a {type(made).__name__}, which is no ddp_recipes.Callback. Derive its "
                f"class from ddp_recipes.Callback and override the events that it needs. Callbacks of Lightning go "
                f"with task=lightning."
            )
        callbacks[name] = callback
    return callbacks
