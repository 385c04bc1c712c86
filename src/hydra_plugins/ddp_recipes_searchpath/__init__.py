"""Lets any Hydra application find the config groups of ``ddp_recipes``.

Hydra imports every plugin in every application, so nothing heavy is imported here.
"""

import math
from collections.abc import Callable
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from ddp_recipes._compat.hydra_ import register_resolver
from ddp_recipes.datasets.classes import column_classes, folder_classes, num_outputs

CONF = "pkg://ddp_recipes.conf"


# The yaml files use these, `${len:...}` and so on, so what finds them must be able to resolve them.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "len": lambda value: len(value),
    "prod": lambda *values: math.prod(values),
    "folder_classes": folder_classes,
    "column_classes": column_classes,
    "num_outputs": num_outputs,
}
for _name, _resolver in _RESOLVERS.items():
    if not OmegaConf.has_resolver(_name):
        register_resolver(_name, _resolver)


class DdpRecipesSearchPath(SearchPathPlugin):
    """Puts ``ddp_recipes.conf`` behind the application's own folders, so that its files win over ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if all(element.path != CONF for element in search_path.get_path()):
            search_path.append(provider="ddp_recipes", path=CONF)
