"""Ranks that serve parameters, and ranks that work on them."""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.strategies.parameter_server.settings import ParameterServerSettings as ParameterServerSettings
    from ddp_recipes.strategies.parameter_server.strategy import ParameterServer as ParameterServer

__all__ = ["ParameterServer", "ParameterServerSettings"]
__getattr__ = on_use(__name__, {".strategy": ["ParameterServer"], ".settings": ["ParameterServerSettings"]})
