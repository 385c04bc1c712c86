"""Overrides that are ours, or that Hydra does not take as they are meant, in Hydra's own words."""

import re
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddp_recipes._compat.hydra_ import Hydra
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
_OF_DATA = ("root", "download", "datamodule", "in_features", "out_features", "train", "val", "test", "predict")
_OF_DATA_LOADER = ("worker_init_fn", "generator")


def refuse_unused(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a key of ``data`` that is none of ours and that nothing refers to.

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
    _refuse_unread(config, overrides)
    text = ""
    for name, given in suspects.items():
        if name in known:
            continue
        text = text or OmegaConf.to_yaml(config)
        if not re.search(rf"\$\{{(data|\.+)\.?{name}\b", text):
            raise RequestError(
                f"{given}: data.{name} is no key of data, and nothing refers to it, so it would do nothing. Keys: "
                f"{', '.join(known)}; arguments of a data set go to it, as in +data.train.{name}=…."
                f"{nearest(name, known)}"
            )


def _refuse_unread(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a key beside the sections that an override adds, and that neither we nor the config read."""
    known = {*(each.name for each in fields(RunSettings)), *OUTSIDE_GROUPS}
    for override in overrides:
        match = re.match(r"\+{1,2}([\w-]+)=", override)
        if match is None or match[1] in known or OmegaConf.is_config(OmegaConf.select(config, match[1])):
            continue
        if not re.search(rf"\$\{{\.*{match[1]}\b", OmegaConf.to_yaml(config)):
            raise RequestError(
                f"{override}: there is no key {match[1]}, and nothing refers to it, so it would do nothing."
                f"{nearest(match[1], known)}"
            )
