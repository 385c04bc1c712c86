"""Overrides that are ours, or that Hydra does not take as they are meant, in Hydra's own words."""

import re
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_recipes._compat.hydra_ import Hydra
from ddp_recipes.config.request import GROUPS
from ddp_recipes.config.settings import DataSettings, RunSettings
from ddp_recipes.errors import RequestError, nearest


def spelled_out(overrides: Sequence[str]) -> list[str]:
    """Return overrides in which ours are spelled out in Hydra's own.

    ``plan.nnodes=4`` is ``cluster.nnodes=4``, and ``plan=true`` where left out: a key cannot be a value and a section.
    ``logger=[tensorboard,csv]`` puts each of them into a section of its own, where Hydra would merge them into one.
    """
    spelled = [re.sub(r"^(\+{0,2}|~)plan\.", r"\1cluster.", override) for override in overrides]
    if spelled != list(overrides) and not any(override.startswith("plan=") for override in overrides):
        spelled.append("plan=true")
    return [one for override in spelled for one in _loggers_apart(override)]


def _loggers_apart(override: str) -> list[str]:
    """Return the overrides that stand for ``logger=[…]``, which is a choice of one where the list has one."""
    match = re.fullmatch(r"logger=\[([^\[\]]*)\]", override)
    if match is None:
        return [override]
    options = list(dict.fromkeys(option.strip(" '\"") for option in match[1].split(",") if option.strip()))
    if len(options) < 2:
        return [f"logger={options[0] if options else 'none'}"]
    return ["logger=[]", *(f"+logger@logger.{option.rpartition('/')[2]}={option}" for option in options)]


def deleting_null(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return overrides in which ``~key`` of a key whose value is null gives it one first: to Hydra null is absent."""
    deleted = {one: one[1:].partition("=")[0] for one in overrides if re.fullmatch(r"~[^=@/]+(=null)?", one)}
    if not deleted:
        return list(overrides)
    # Nor what is added, in the place of what is deleted, maybe.
    others = [one for one in overrides if one not in deleted and not re.match(r"\+[\w.]+\.\w+=", one)]
    config = hydra.compose_config(config_name, others, RunMode.MULTIRUN, validate_sweep_overrides=False)
    null = {key for key in deleted.values() if OmegaConf.select(config, key, default=0) is None}
    return [
        each
        for one in overrides
        for each in ([f"++{deleted[one]}=0", f"~{deleted[one]}"] if deleted.get(one) in null else [one])
    ]


def quoted(text: str) -> str:
    """Return a text as one value of an override, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


OUTSIDE_GROUPS = ("experiment", "debug")  # whose options are merged into all of the config
_SECTIONS = ("callbacks", "cluster", "hydra", "resume", "sweep")  # besides those that a run cannot do without
_OF_DATA = ("root", "download", "datamodule", "in_features", "out_features", "train", "val", "test", "predict")
_OF_DATA_LOADER = ("worker_init_fn", "generator")


def refuse_unused(config: DictConfig, overrides: Sequence[str], hydra: Hydra) -> None:
    """Refuse a key of ``data``, or one beside the sections, that is none of ours and that nothing refers to.

    Of those in a yaml the ones that were meant to do something: objects, arguments of torch's ``DataLoader``, what
    differs from a key by a letter or two. Others may describe the data, for one model or another.

    Raises:
        RequestError: it would do nothing.
    """
    known = [*(each.name for each in fields(DataSettings)), *_OF_DATA]
    data: Any = OmegaConf.to_container(config.data) if OmegaConf.is_dict(config.get("data")) else {}
    suspects = {
        name: f"data.{name}"
        for name, value in data.items()
        if (isinstance(value, dict) and "_target_" in value)
        or name in _OF_DATA_LOADER
        or get_close_matches(name, known, 1, 0.8)
    }
    for override in overrides:
        match = re.match(r"\+{1,2}data\.(\w+)=", override)
        if match and not OmegaConf.is_config(OmegaConf.select(config, f"data.{match[1]}")):
            suspects[match[1]] = override
    _refuse_unread(config, overrides, hydra)
    text = ""
    for name, given in suspects.items():
        if name in known:
            continue
        text = text or OmegaConf.to_yaml(config)
        if not _is_read(rf"(data|\.+)\.?{name}", text):
            raise RequestError(
                f"{given}: data.{name} is no key of data, and nothing refers to it, so it would do nothing. Keys: "
                f"{', '.join(known)}; arguments of a data set go to it, as in +data.train.{name}=…."
                f"{nearest(name, known)}"
            )


def _refuse_unread(config: DictConfig, overrides: Sequence[str], hydra: Hydra) -> None:
    """Refuse a key or a section beside ours that neither we nor the config read.

    A key that an override adds, or an option of a group of ours; a section that differs from ours by a letter or two.
    """
    known = {*(each.name for each in fields(RunSettings)), *OUTSIDE_GROUPS, *GROUPS, *_SECTIONS}
    suspects = {str(name): str(name) for name in config if get_close_matches(str(name), known, 1, 0.8)}
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        group, _, package = key.partition("@")
        name = re.split("[./]", package or group)[0]
        is_section = "." in key or OmegaConf.is_config(config.get(name))  # of a user's own, which may be a record
        meant = group in GROUPS or not is_section or get_close_matches(name, known, 1, 0.8)
        if override.startswith("+") and meant and (group in GROUPS or not _is_choice(key, config, hydra)):
            suspects[name] = override
    text = ""
    for name, given in suspects.items():
        if name in known or name == "_global_":
            continue
        text = text or OmegaConf.to_yaml(config)
        if not _is_read(rf"\.*{re.escape(name)}", text):
            raise RequestError(
                f"{given}: there is no key {name}, and nothing refers to it, so it would do nothing."
                f"{nearest(name, get_close_matches(name, known, 1, 0.8))}"
            )


def _is_choice(key: str, config: DictConfig, hydra: Hydra) -> bool:
    """Whether an override that adds this chooses an option of a group, which its yaml may merge into any section."""
    if key in config.hydra.runtime.choices or hydra.config_loader.get_group_options(key.partition("@")[0]):
        return True
    return bool(config.hydra.searchpath) and re.split("[.@/]", key)[0] not in config  # options there, swept over


def _is_read(pattern: str, text: str) -> bool:
    """Whether an interpolation in a yaml's text reads what is written like this, by itself or through a resolver."""
    return re.search(rf"\$\{{(.*[:, ])?{pattern}\b", text) is not None
