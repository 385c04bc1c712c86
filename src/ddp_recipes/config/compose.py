"""Hydra's part: from the command line to a composed config, and its errors in one message."""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from ddp_recipes._compat.hydra_ import (
    Callbacks,
    Hydra,
    create_config_search_path,
    execution_whitelist,
    get_args_parser,
    outcome,
    run_hydra,
    use_defaults_of_1_3,
)
from ddp_recipes.config.keys import parse as parse_keys
from ddp_recipes.config.monitor import better
from ddp_recipes.config.settings import DataSettings, SweepSettings
from ddp_recipes.config.translate import translated
from ddp_recipes.errors import RequestError, nearest

JOB_NAME = "train"

Task = Callable[[DictConfig], float | None]


def parse(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse a command line as Hydra does."""
    parser = get_args_parser()
    args = parser.parse_args(list(argv))
    args.overrides = spelled_out(args.overrides)
    return parser, args


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


def separate_loggers(config: DictConfig) -> None:
    """Give each logger of a job a section of its own where Hydra merged those of a list, one value of a sweep.

    Raises:
        RequestError: a list in a yaml is merged, too; the message says how else to list them.
    """
    cfg, hydra = HydraConfig.get(), GlobalHydra.instance().hydra
    if "_target_" not in (config.get("logger") or {}) or "logger" in cfg.runtime.choices:
        return
    assert hydra is not None
    overrides = [*cfg.overrides.hydra, *cfg.overrides.task]
    if spelled_out(overrides) != overrides:
        with open_dict(config):
            config.logger = hydra.compose_config(cfg.job.config_name, spelled_out(overrides), RunMode.RUN).logger
        return
    found = hydra.config_loader.compute_defaults_list(cfg.job.config_name, overrides, RunMode.RUN).defaults
    paths = [str(one.config_path) for one in found if one.package == "logger"]
    options = [path.removeprefix("logger/") for path in paths if path.startswith("logger/")]
    if len(options) > 1:
        entries = ", ".join(f"{option}@{option}" for option in options)
        raise RequestError(
            f"logger: [{', '.join(options)}] in a yaml is merged by Hydra into one. Write logger=[{','.join(options)}] "
            f"on the command line, or choose an option of your own, logger/several.yaml, with the defaults list "
            f"[{entries}]."
        )


def is_question(args: argparse.Namespace) -> bool:
    """Whether the command line asks Hydra something (``--help``, ``--cfg job``, …) instead of running."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def answer(parser: argparse.ArgumentParser, args: argparse.Namespace, config_path: str, config_name: str) -> None:
    """Let Hydra answer; it exits by itself where it fails."""
    use_defaults_of_1_3()
    run_hydra(args, parser, lambda _: None, config_path, config_name)


@contextmanager
def session(config_path: str, config_dir: str | None = None) -> Iterator[Hydra]:
    """Yield a Hydra that finds configs in ``config_dir``, then in ``config_path``.

    Raises:
        RequestError: ``config_dir`` is no folder.
    """
    use_defaults_of_1_3()
    search_path = create_config_search_path(config_path)
    if config_dir is not None:
        if not os.path.isdir(config_dir):
            raise RequestError(f"--config-dir {config_dir} is no folder. Give the folder that holds your groups.")
        absolute = f"file://{os.path.abspath(config_dir)}"
        search_path.prepend("command-line", absolute)  # before the shipped ones: the user's own file is meant
    former = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with execution_whitelist():  # for Hydra's own callbacks and logging
            yield Hydra.create_main_hydra2(task_name=JOB_NAME, config_search_path=search_path)
    finally:
        GlobalHydra.instance().clear()
        if former is not None:
            GlobalHydra.instance().initialize(former)


def compose(hydra: Hydra, config_name: str, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> DictConfig:
    """Compose a config, with Hydra's own section in it; in a multirun with what is swept over as it was written.

    Raises:
        RequestError: an override names a group, option or key that does not exist; the nearest one is offered. Or a
            value of ``sweep.*`` is not allowed, which is for the sweep and not for each of its jobs.
    """
    with translated(hydra, config_name, overrides):
        single = mode is RunMode.RUN
        config = hydra.compose_config(config_name, list(overrides), mode, validate_sweep_overrides=single)
        parse_keys(SweepSettings, "sweep", config.get("sweep") or {})
        _refuse_unused(config, overrides)
        return config


def single(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> DictConfig | None:
    """Compose the config of one run; return ``None`` where a yaml asks for a sweep, by ``hydra.mode``.

    Raises:
        RequestError: as in :func:`compose`.
    """
    try:
        config = compose(hydra, config_name, overrides)
    except RequestError:  # the overrides may be for a sweep
        with translated(hydra, config_name, overrides):
            config = hydra.compose_config(config_name, list(overrides), RunMode.RUN, validate_sweep_overrides=False)
        if config.hydra.mode is not RunMode.MULTIRUN:
            raise
    return None if config.hydra.mode is RunMode.MULTIRUN else config


def run(hydra: Hydra, config: DictConfig, config_name: str, task: Task) -> None:
    """Run one job as ``Hydra.run`` does, in its directory and with its callbacks; the task's own error comes out."""
    config.hydra.mode = RunMode.RUN
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name=config_name)
    result = run_job(
        hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
        task_function=task,
        config=config,
        job_dir_key="hydra.run.dir",
        job_subdir_key=None,
    )
    callbacks.on_run_end(config=config, config_name=config_name, job_return=result)
    outcome(result)


def sweep_directory(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> str:
    """Return ``hydra.sweep.dir`` of a multirun, resolved: the time in it is now.

    Raises:
        RequestError: as in :func:`compose`.
    """
    with translated(hydra, config_name, overrides):
        config = compose(hydra, config_name, [*overrides, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
        return os.path.abspath(str(config.hydra.sweep.dir))


def multirun(hydra: Hydra, config_name: str, overrides: Sequence[str], directory: str, task: Task) -> None:
    """Let Hydra's sweeper and launcher run one job for each combination, in folders of ``directory``.

    Raises:
        RequestError: as in :func:`compose`.
    """
    own = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={quoted(directory)}"]
    with translated(hydra, config_name, overrides):
        hydra.multirun(config_name, task, [*overrides, *_direction(hydra, config_name, overrides), *own])


def _direction(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> list[str]:
    """Return the override that has a sweeper which optimises follow the monitored metric, where it would not."""
    config = compose(hydra, config_name, [*overrides, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
    checkpoint, direction = config.get("checkpoint") or {}, config.hydra.sweeper.get("direction")
    direction = getattr(direction, "name", direction)  # Optuna's is an enum
    mode, monitor = checkpoint.get("mode"), str(checkpoint.get("monitor"))
    mode = better("loss" if monitor in ("auto", "None") else monitor) if mode == "auto" else mode
    wanted = {"min": "minimize", "max": "maximize"}.get(str(mode))
    given = any("hydra.sweeper.direction=" in one for one in overrides)
    if given or not isinstance(direction, str) or wanted in (None, direction):
        return []
    print(f"hydra.sweeper.direction={wanted}, for checkpoint.monitor={monitor} is better that way.", flush=True)
    return [f"hydra.sweeper.direction={wanted}"]


def quoted(text: str) -> str:
    """Return a text as one value of an override, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def overrides_of_job() -> list[str]:
    """Return the overrides of the job that is running, as they were written: a secret stays ``${oc.env:…}``."""
    texts = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(texts, list)
    return [str(text) for text in texts]


def record() -> dict[str, str]:
    """Return Hydra's record of the job that is running: the texts of the files in ``.hydra/`` but for the config's."""
    cfg = HydraConfig.get()
    return {
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": cfg})),
        "overrides.yaml": OmegaConf.to_yaml(cfg.overrides.task),
    }


def _refuse_unused(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a key added to ``data`` that is none of ours and that nothing refers to: it would do nothing."""
    known = [each.name for each in fields(DataSettings)]
    text = ""
    for override in overrides:
        match = re.match(r"\+{1,2}data\.(\w+)=", override)
        if match is None or match[1] in known or OmegaConf.is_config(OmegaConf.select(config, f"data.{match[1]}")):
            continue
        text = text or OmegaConf.to_yaml(config)
        if not re.search(rf"\$\{{(data|\.+)\.?{match[1]}\b", text):
            raise RequestError(
                f"{override}: data.{match[1]} is no key of data, and nothing refers to it, so it would do nothing. "
                f"Keys: {', '.join(known)}; arguments of a data set go to it, as in +data.train.{match[1]}=…"
                f"{nearest(match[1], known)}"
            )
