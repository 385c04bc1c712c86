"""Ranks that serve parameters, and ranks that work on them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_recipes.strategies.parameter_server.settings import ParameterServerSettings

if TYPE_CHECKING:
    from ddp_recipes.strategies.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer", "ParameterServerSettings"]


def __getattr__(name: str) -> Any:
    """Import the strategy when it is first used: it loads torch, which settings do not."""
    if name != "ParameterServer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.strategy").ParameterServer
