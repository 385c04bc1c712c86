"""Lets any Hydra application find the config groups of ``ddp_recipes``.

Hydra imports every plugin in every application, so nothing heavy is imported here.
"""

import math
from collections.abc import Sized

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from ddp_recipes._compat.omegaconf_ import register_resolver

CONF = "pkg://ddp_recipes.conf"


def _len(value: Sized) -> int:
    return len(value)


def _prod(*values: int) -> int:
    return math.prod(values)


# The yaml files say `${len:...}` and `${prod:...}`, so whoever finds them must be able to resolve that.
for _name, _resolver in (("len", _len), ("prod", _prod)):
    if not OmegaConf.has_resolver(_name):
        register_resolver(_name, _resolver)


class DdpRecipesSearchPath(SearchPathPlugin):
    """Puts ``ddp_recipes.conf`` behind the application's own folders, so that its files win over ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if all(element.path != CONF for element in search_path.get_path()):
            search_path.append(provider="ddp_recipes", path=CONF)
