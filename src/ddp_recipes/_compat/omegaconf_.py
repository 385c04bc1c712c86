"""Resolvers of interpolations, registered as each version of OmegaConf wants it."""

from collections.abc import Callable
from typing import Any

import omegaconf
from omegaconf import OmegaConf


def register_resolver(name: str, resolver: Callable[..., Any], *, replace: bool = False) -> None:
    """Register a resolver: ``register_resolver`` of OmegaConf 2.4, or ``register_new_resolver``, deprecated there.

    What it takes and returns is not checked against its annotations, as before 2.4.
    """
    if omegaconf.__version__.startswith("2.3."):  # whose register_resolver is another one, of before 2.1
        OmegaConf.register_new_resolver(name, resolver, replace=replace)
    else:
        register: Any = OmegaConf.register_resolver
        register(name, resolver, replace=replace, annotation_validation="off")
