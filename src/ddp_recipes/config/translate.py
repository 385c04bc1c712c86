"""Hydra's errors in one message: what was given, what there is, and the nearest name."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, get_args

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError  # type: ignore[import-untyped]

from ddp_recipes._compat.hydra_ import Hydra
from ddp_recipes._compat.messages import (
    added_twice,
    config_of_error,
    is_about_a_choice,
    null_that_was_merged_into,
    unknown_override,
    without_search_path,
)
from ddp_recipes.config.extras import BEFORE_CONFIG
from ddp_recipes.config.settings import Mode
from ddp_recipes.errors import RequestError, nearest

OPEN = ("model", "task", "optimizer", "scheduler", "logger", "callbacks", "hydra")  # sections that may get more keys

# What others call what we have under another name.
_LIGHTNING = {
    "devices": "launcher.nproc_per_node",
    "gpus": "launcher.nproc_per_node",
    "num_processes": "launcher.nproc_per_node",
    "num_nodes": "launcher.nnodes",
    "accelerator": "launcher.device",
    "strategy": "the group strategy",
    "callbacks": "the group callbacks (callbacks=early_stopping)",
    "logger": "the group logger (logger=[tensorboard,csv])",
    "profiler": "debug=profiler",
    "enable_progress_bar": "trainer.progress",
    "enable_checkpointing": "checkpoint.enabled",
    "enable_model_summary": "callbacks=model_summary",
    "enable_autolog_hparams": "done by every logger, so there is no key for it",
    "default_root_dir": "hydra.run.dir",
    "weights_save_path": "hydra.run.dir",
    "sync_batchnorm": "the key of that name in the group strategy",
    "use_distributed_sampler": "done by itself, so there is no key for it",
    "replace_sampler_ddp": "done by itself, so there is no key for it",
    "plugins": "trainer.precision, or a strategy or launcher of your own,",
    "inference_mode": "done by itself, so there is no key for it",
    "barebones": "logger=none checkpoint=none trainer.progress=false",
    "reload_dataloaders_every_n_epochs": "a data set that follows the epoch",
    "min_epochs": "callbacks.early_stopping.patience",
    "min_steps": "callbacks.early_stopping.patience",
    "model_registry": "logger=mlflow",
    "resume_from_checkpoint": "ckpt_path",
    "ckpt_path": "ckpt_path, without a section,",
    "auto_lr_find": "tune=lr",
    "auto_scale_batch_size": "tune=batch_size",
    "track_grad_norm": "train/grad_norm, which is logged by itself,",
    "stochastic_weight_avg": "callbacks=ema",
    "amp_backend": "trainer.precision",
    "checkpoint_callback": "checkpoint.enabled",
    "log_gpu_memory": "debug=profiler",
    "tpu_cores": "launcher.device",
    "ipus": "launcher.device",
    "hpus": "launcher.device",
    "distributed_backend": "the group strategy",
    "weights_summary": "callbacks=model_summary",
    "progress_bar_refresh_rate": "trainer.progress",
    "process_position": "trainer.progress",
    "prepare_data_per_node": "done by itself, so there is no key for it",
    "flush_logs_every_n_steps": "trainer.log_every_n_steps",
    "multiple_trainloader_mode": "a data set of your own",
    "terminate_on_nan": "done by itself, so there is no key for it",
    "truncated_bptt_steps": "a task of your own",
    "move_metrics_to_cpu": "done by itself, so there is no key for it",
    "reload_dataloaders_every_epoch": "a data set that follows the epoch",
    "amp_level": "trainer.precision",
    "val_percent_check": "trainer.limit_val_batches",
    "train_percent_check": "trainer.limit_train_batches",
}
# What has an option or a key by now, under other names that one may try.
_BY_NOW = {
    "epochs": "trainer.max_epochs",
    "max_epochs": "trainer.max_epochs",
    "learning_rate": "optimizer.lr",
    "lr_find": "tune=lr",
    "nproc_per_node": "launcher.nproc_per_node",
    "resume": "ckpt_path",
    "patience": "callbacks=early_stopping",
    "fp16": "trainer.precision=16-mixed",
    "bf16": "trainer.precision=bf16-mixed",
    "amp": "trainer.precision=16-mixed",
}


_SWEPT = "hydra.sweeper.params"


@contextmanager
def translated(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> Iterator[None]:
    """Raise Hydra's errors, and those of reading a yaml, as requests that cannot be met."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, MarkedYAMLError) as error:
        raise RequestError(_message(error, hydra, config_name, overrides)) from None
    except (ValueError, TypeError, AttributeError, AssertionError, OSError, RecursionError) as error:
        if not comes_of_hydra(error):
            raise
        raise RequestError(_wrong_choice(error, hydra, overrides)) from None


def comes_of_hydra(error: BaseException) -> bool:
    """Whether an error is Hydra's own, about its config: neither of a job nor of a plugin, whose tracebacks help."""
    modules = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    return [each for each in modules if each not in sys.stdlib_module_names][-1:] in (
        ["hydra"],
        ["omegaconf"],
        ["antlr4"],
    )


def _of_word(word: str) -> str:
    """Return what a word alone may stand for: a mode, or a command, which comes first."""
    mode = {"train": "fit"}.get(word, word)
    if mode in get_args(Mode):
        return f" Did you mean 'mode={mode}'?"
    return f" Commands: {', '.join(BEFORE_CONFIG)}.{nearest(word, BEFORE_CONFIG)}" if word.isidentifier() else ""


def _message(error: Exception, hydra: Hydra, config_name: str, overrides: Sequence[str]) -> str:
    """Return what is wrong, and the nearest name there is."""
    if isinstance(error, MarkedYAMLError):
        return _of_yaml(error)
    if isinstance(error, OverrideParseException):
        return _unread(error)
    if is_about_a_choice(error):
        return _wrong_choice(error, hydra, overrides)
    if isinstance(error, MissingConfigException):
        return _no_option(error, hydra, overrides)
    if (there := added_twice(error)) is not None and (given := _given(f"+{there}", overrides)):
        return f"{given}: {there} is there already, so there is nothing to add. Write {given.lstrip('+')}."
    if (key := unknown_override(error)) is not None:
        return _unknown(key.split("@")[0], error, hydra, config_name, overrides)
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(("full_key:", "object_type="))]
    if error.__cause__ is not None and (not lines or "Error merging override" in lines[0]):
        what = lines[0].removeprefix("Error merging override ") if lines else getattr(error.__cause__, "full_key", "")
        return f"{what}: {str(error.__cause__).splitlines()[0]}."
    key = error.full_key if isinstance(error, OmegaConfBaseException) else None
    return f"{f'{key}: ' if key else ''}{' '.join(lines)}"


def _unread(error: OverrideParseException) -> str:
    given = str(error.override)
    name, equals, value = map(str.strip, given.partition("="))
    if name and equals and f"{name}={value}" != given:
        return f"{given}: there are spaces around the equals sign. Write {name}={value}."
    lines = error.message.splitlines()
    reason = next((line for line in lines if not line.startswith(("Error parsing", "Error when parsing"))), lines[-1])
    return (
        f"{given}: Hydra cannot read this override ({reason}). It reads key=value, +key=value, ~key, and -m key=1,2; "
        f"quote a value with special characters twice: 'key=\"a, b\"'.{_of_word(given)}"
    )


def _of_yaml(error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = "A yaml" if mark is None else f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
    return f"{where}: {error.problem or error.context}."


def _no_option(error: MissingConfigException, hydra: Hydra, overrides: Sequence[str]) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or hydra.config_loader.get_group_options(group)) if group or option else []
    if options and not group:
        there = [name for name in options if not name.startswith("_")]
        return f"--config-name {option}: there is none. There are: {', '.join(there)}.{nearest(option, there)}"
    if not options:
        return without_search_path(error)
    listed = config_of_error(error)
    where = "" if listed is None or _given(group, overrides) else f" {listed}.yaml has it in its defaults list."
    return (
        f"{group}={option}: there is no such option. Options of {group}: {', '.join(options)}."
        f"{nearest(option, options)}{where}"
    )


def _wrong_choice(error: Exception, hydra: Hydra, overrides: Sequence[str]) -> str:
    groups = hydra.config_loader.list_groups("")
    for given in overrides:
        if (group := _key(given)) in groups:
            options = hydra.config_loader.get_group_options(group)
            if (choice := given.partition("=")[2]) not in options:
                none = f" For none of them: '~{group}'." if "null" in choice.split(",") else ""
                return f"{given}: there is no such option. Options of {group}: {', '.join(sorted(options))}.{none}"
    key = null_that_was_merged_into(error)
    if merged := [one for one in overrides if key and f"{_key(one)}.".startswith(f"{key}.")]:
        instead = " Give what it would hold as overrides: -m optimizer.lr=interval(0.01,0.1)." if key == _SWEPT else ""
        return f"{merged[0]}: {key} is null, and Hydra puts no keys into it.{instead}"
    given = next((one for one in overrides if repr(one) in repr(str(error))), "This")
    if (without := next((one for one in overrides if not _key(one)), None)) is not None:
        return f"{without}: there is no key before the equals sign. Write key=value."
    return f"{given}: Hydra cannot compose a config of it: {str(error).splitlines()[0]}."


def _unknown(key: str, error: Exception, hydra: Hydra, config_name: str, overrides: Sequence[str]) -> str:
    given, listed = _given(key, overrides), config_of_error(error)
    if given is None and listed is not None:
        return (
            f"{listed}.yaml overrides {key}, which Hydra allows for a group that comes before it in the defaults list. "
            f"Put this into an option of experiment, which comes last."
        )
    others = [one for one in overrides if _key(one) != key]
    if given is None and f"{_SWEPT}.{key}" in _keys(hydra, config_name, others, with_hydra=True):
        given = f"{_SWEPT}: {key}"  # of a yaml, which the sweeper makes overrides of
    given = given or key
    within = str(getattr(error.__cause__, "full_key", ""))  # of a section that is given as a mapping, key={…}
    key, added = (within, f"{within}=…") if within.startswith(f"{key}.") else (key, given.removeprefix(f"{_SWEPT}: "))
    if (lightning := _LIGHTNING.get(key.removeprefix("trainer."))) and key.startswith("trainer."):
        return f"{given}: there is no key {key}. What Lightning calls so is {lightning} here."
    section = key.rpartition(".")[0]
    names = _keys(hydra, config_name, others, with_hydra=key.startswith("hydra."))
    siblings = [name.removeprefix(f"{section}.") for name in names if name.rpartition(".")[0] == section]
    allowed = f" Keys of {section}: {', '.join(sorted(siblings))}." if section and siblings else ""
    may_grow = section in names and (section.split(".")[0] in OPEN or section.startswith("data."))
    advice = f" To add a key that the yaml does not have, write +{added}."
    return (
        f"{given}: there is no key {key}.{_elsewhere(key, names, hydra)}{allowed}"
        f"{advice if may_grow and given[0] not in '+~' else ''}"
    )


def _elsewhere(key: str, names: Sequence[str], hydra: Hydra) -> str:
    """Return where there is what a key names: a key of a section, an option of a group, or what is written like it."""
    others = [name for name in names if name not in (key, key.rpartition(".")[0])]
    groups = [one for one in hydra.config_loader.list_groups("") if key in hydra.config_loader.get_group_options(one)]
    sections = [name for name in others if name.rpartition(".")[2] == key and name.count(".") == 1]
    preferred = [name for name in sections if name.startswith(("optimizer.", "trainer.", "data.", "launcher."))]
    found = _BY_NOW.get(key) or (f"{groups[0]}={key}" if groups else next(iter([*preferred, *sections]), None))
    return nearest(key, others) if found is None or found == key else f" Did you mean '{found}'?"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~").split("@")[0]


def _given(key: str, overrides: Sequence[str]) -> str | None:
    """Return the override of this key, as it was given."""
    plain = key.lstrip("+")
    return next((one for one in overrides if _key(one) == plain and one.startswith(key[: len(key) - len(plain)])), None)


def _keys(hydra: Hydra, config_name: str, overrides: Sequence[str], *, with_hydra: bool) -> list[str]:
    """Return all dotted keys and groups there are without the override that failed."""
    try:
        config = hydra.compose_config(config_name, list(overrides), RunMode.MULTIRUN, validate_sweep_overrides=False)
    except (HydraException, OmegaConfBaseException):
        return []
    plain: Any = OmegaConf.to_container(config)
    if not with_hydra:
        del plain["hydra"]
    return [*_dotted(plain), *hydra.config_loader.list_groups("")]


def _dotted(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
