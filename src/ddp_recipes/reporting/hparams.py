"""The hyper-parameters of a run, for a logger's table of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_recipes.loggers.base import Parameter

GROUPS = ("seed", "data", "model", "task", "optimizer", "scheduler", "strategy", "trainer")  # may change the outcome


def hyper_parameters(config: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return them as one level of dotted names: ``{"model": "Toy", "optimizer.lr": 0.1, …}``."""
    values = _flat({name: config[name] for name in GROUPS})
    return {name: value for name, value in values.items() if not name.startswith(("data.val.", "data.test"))}


def overridden(overrides: Sequence[str]) -> list[str]:
    """Return the keys and groups that overrides set."""
    return [override.split("=")[0].lstrip("+~") for override in overrides]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Parameter]:
    """Return a nested config as one level of dotted names; a section itself is the last name of its ``_target_``."""
    values: dict[str, Parameter] = {}
    for name, value in config.items():
        if name == "_target_":
            values[prefix.removesuffix(".")] = str(value).rpartition(".")[2]
        elif isinstance(value, Mapping):
            values |= _flat(value, f"{prefix}{name}.")
        elif value is not None and name != "_partial_":
            values[f"{prefix}{name}"] = value if isinstance(value, (bool, int, float)) else str(value)
    return values
