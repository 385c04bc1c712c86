"""Lets any Hydra application find the config groups of ``ddp_recipes``.

Hydra imports every plugin in every application, so nothing heavy is imported here.
"""

import math

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from ddp_recipes._compat.omegaconf_ import register_resolver

CONF = "pkg://ddp_recipes.conf"


# The yaml files use `${len:...}` and `${prod:...}`, so what finds them must be able to resolve these.
for _name, _resolver in (("len", lambda value: len(value)), ("prod", lambda *values: math.prod(values))):
    if not OmegaConf.has_resolver(_name):
        register_resolver(_name, _resolver)


class DdpRecipesSearchPath(SearchPathPlugin):
    """Puts ``ddp_recipes.conf`` behind the application's own folders, so that its files win over ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if all(element.path != CONF for element in search_path.get_path()):
            search_path.append(provider="ddp_recipes", path=CONF)
