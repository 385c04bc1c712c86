"""Hydra's errors in one message: what was given, what there is, and the nearest name."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_recipes._compat.hydra_ import Hydra
from ddp_recipes._compat.messages import unknown_override, without_search_path
from ddp_recipes.errors import RequestError, nearest

# What others call what we have under another name.
_LIGHTNING = {
    "trainer.devices": "launcher.nproc_per_node",
    "trainer.num_nodes": "launcher.nnodes",
    "trainer.accelerator": "launcher.device",
    "trainer.strategy": "the group strategy",
    "trainer.callbacks": "the group callbacks (+callbacks=early_stopping)",
    "trainer.logger": "the group logger (logger=[tensorboard,csv])",
    "trainer.profiler": "debug=profiler",
    "trainer.enable_progress_bar": "trainer.progress",
    "trainer.enable_checkpointing": "checkpoint.enabled",
    "trainer.default_root_dir": "hydra.run.dir",
}


@contextmanager
def translated(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> Iterator[None]:
    """Raise Hydra's errors as requests that cannot be met."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(error, hydra, config_name, overrides) from None


def _translate(error: Exception, hydra: Hydra, config_name: str, overrides: Sequence[str]) -> RequestError:
    """Return Hydra's error as one message that offers the nearest name."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = sorted(error.options or hydra.config_loader.get_group_options(group))
        if options:
            return RequestError(
                f"{group}={option}: there is no such option. Options of {group}: {', '.join(options)}."
                f"{nearest(option, options)}"
            )
    if isinstance(error, MissingConfigException):
        return RequestError(without_search_path(error))
    unknown = unknown_override(error)
    if unknown is None:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return RequestError("\n".join(lines))
    key = unknown.split("@")[0]
    names = _keys(hydra, config_name, [one for one in overrides if one.split("=")[0].lstrip("+~").split("@")[0] != key])
    section = key.rpartition(".")[0]
    siblings = [name.removeprefix(f"{section}.") for name in names if name.rpartition(".")[0] == section]
    given = next((one for one in overrides if key in one), key)
    if key in _LIGHTNING:
        return RequestError(f"{given}: there is no key {key}. What Lightning calls so is {_LIGHTNING[key]} here.")
    allowed = f" Keys of {section}: {', '.join(sorted(siblings))}." if section and siblings else ""
    return RequestError(
        f"{given}: there is no key {key}.{nearest(key, names)}{allowed} To add a key that the yaml does not have, "
        f"write +{given.lstrip('+~')}."
    )


def _keys(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return all dotted keys and groups there are without the override that failed."""
    try:
        config = hydra.compose_config(config_name, list(overrides), RunMode.MULTIRUN, validate_sweep_overrides=False)
    except (HydraException, OmegaConfBaseException):
        return []
    plain: Any = OmegaConf.to_container(config)
    del plain["hydra"]
    return [*_dotted(plain), *hydra.config_loader.list_groups("")]


def _dotted(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
