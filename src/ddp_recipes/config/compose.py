"""Hydra's part: from the command line to a composed config, and on to plain data."""

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path, PurePath
from types import NoneType
from typing import Any, get_type_hints

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.types import HydraContext, RunMode
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_recipes._compat.hydra_ import (
    Callbacks,
    Hydra,
    create_config_search_path,
    execution_whitelist,
    get_args_parser,
    outcome,
    register_resolver,
    use_defaults_of_1_3,
)
from ddp_recipes._compat.messages import missing_interpolation_key
from ddp_recipes._version import __version__
from ddp_recipes.config import kinds
from ddp_recipes.config.keys import of_environment, parse as parse_keys
from ddp_recipes.config.overrides import deleting_null, quoted, refuse_unused, spelled_out
from ddp_recipes.config.request import Request
from ddp_recipes.config.settings import RunSettings, SweepSettings, better
from ddp_recipes.config.translate import comes_of_hydra, translated
from ddp_recipes.errors import RequestError, nearest

JOB_NAME = "train"
_TYPED = ("data", "trainer", "checkpoint", "launcher", "model", "cluster")  # whose types follow from no other key

Task = Callable[[DictConfig], float | None]


def parse(argv: Sequence[str]) -> tuple[ArgumentParser, Namespace]:
    """Parse a command line as Hydra does; where it asks for the version, print ours and exit.

    Raises:
        RequestError: a flag would do nothing.
    """
    parser = get_args_parser()
    if "--version" in argv:
        print(f"ddp_recipes {__version__}, torch {version('torch')}, Hydra {version('hydra-core')}")
        raise SystemExit(0)
    args = parser.parse_intermixed_args(list(argv))  # overrides may stand on both sides of a flag
    if args.experimental_rerun:
        raise RequestError(
            "--experimental-rerun takes what Hydra pickled, and there is nothing. To run a config again, leave it to "
            "ddp_recipes.run(OmegaConf.load('outputs/…/config.yaml'))."
        )
    about_cfg = ("--resolve", args.resolve, args.cfg or args.help), ("--package", args.package, args.cfg)
    for flag, given, shows in about_cfg:
        if given and not shows:
            raise RequestError(f"{flag} is about what --cfg shows, and there is no --cfg, as in --cfg job {flag}.")
    args.overrides = spelled_out(args.overrides)
    return parser, args


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
    former, job = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        with execution_whitelist("logging.*"):  # for Hydra's own callbacks and logging
            yield Hydra.create_main_hydra2(task_name=JOB_NAME, config_search_path=search_path)
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = job  # --help and --cfg set it
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
        refuse_unused(config, overrides, hydra)
        kinds.check_hydra(config)
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
    with translated(hydra, config_name, overrides):
        return None if config.hydra.mode is RunMode.MULTIRUN else config


def run(hydra: Hydra, config: DictConfig, config_name: str, task: Task) -> None:
    """Run one job as ``Hydra.run`` does, in its directory and with its callbacks; the task's own error comes out."""
    config.hydra.mode = RunMode.RUN
    try:
        callbacks = Callbacks(config)
        callbacks.on_run_start(config=config, config_name=config_name)
        result = run_job(
            hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=callbacks),
            task_function=task,
            config=config,
            job_dir_key="hydra.run.dir",
            job_subdir_key=None,
        )
    except Exception as error:
        if not comes_of_hydra(error):
            raise
        raise RequestError(f"Hydra cannot start this job: {type(error).__name__} {error}. Check hydra.*.") from error
    callbacks.on_run_end(config=config, config_name=config_name, job_return=result)
    outcome(result)


def directory_of(config: DictConfig, key: str) -> tuple[Path, bool]:
    """Return ``hydra.run.dir`` or ``hydra.sweep.dir``, and whether its name follows the clock.

    Raises:
        RequestError: it is no directory, or follows what is not there.
    """
    try:
        given, section = OmegaConf.select(config, key), OmegaConf.select(config, key.rpartition(".")[0])
        follows_clock = section is not None and "${now:" in str(OmegaConf.to_container(section, resolve=False))
    except (OmegaConfBaseException, ValueError) as error:
        raise RequestError(f"{key}: {_first_line(error)}") from None
    if not isinstance(given, str):
        raise RequestError(f"{key}={given} is no directory. Allowed: the path of one.")
    return Path(given).absolute(), follows_clock


def for_sweep(hydra: Hydra, config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Return the config of a multirun: the time in ``hydra.sweep.dir`` is now.

    Raises:
        RequestError: as in :func:`compose`.
    """
    return compose(hydra, config_name, [*overrides, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)


def multirun(hydra: Hydra, config_name: str, overrides: Sequence[str], directory: str, task: Task) -> None:
    """Let Hydra's sweeper and launcher run one job for each combination, in folders of ``directory``.

    Raises:
        RequestError: as in :func:`compose`.
    """
    config = for_sweep(hydra, config_name, overrides)
    own = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={quoted(directory)}"]
    for key, value, why in _followed(config):
        if not any(f"{key}=" in one for one in overrides):
            print(f"{key}={value}, for {why}.", flush=True)
            own.append(f"{key}={value}")
    with translated(hydra, config_name, overrides):
        hydra.multirun(config_name, task, [*overrides, *own])


def _followed(config: DictConfig) -> Iterator[tuple[str, object, str]]:
    """Yield keys of a sweeper that optimises, which follow the run's where they are not given, their values, and why.

    Raises:
        RequestError: it is to optimise several values, and a run has one.
    """
    sweeper, checkpoint = config.hydra.sweeper, config.get("checkpoint") or {}
    direction, sampler = sweeper.get("direction"), sweeper.get("sampler")
    if isinstance(direction, ListConfig) and len(direction) != 1:
        raise RequestError(
            f"hydra.sweeper.direction={direction} is for {len(direction)} values, and a job returns one: that of "
            f"checkpoint.monitor. Give one direction, minimize or maximize."
        )
    direction = getattr(direction, "name", direction)  # Optuna's is an enum
    mode, monitor = checkpoint.get("mode"), str(checkpoint.get("monitor"))
    mode = better("loss" if monitor in ("auto", "None") else monitor) if mode == "auto" else mode
    wanted = {"min": "minimize", "max": "maximize"}.get(str(mode))
    if isinstance(direction, str) and wanted not in (None, direction):
        yield "hydra.sweeper.direction", wanted, f"checkpoint.monitor={monitor} is better that way"
    unseeded = isinstance(sampler, DictConfig) and sampler.get("seed", 0) is None
    if unseeded and sweeper.get("storage") is None and isinstance(config.seed, int):  # with one, others sample as well
        yield "hydra.sweeper.sampler.seed", config.seed, "an interrupted sweep goes on where it is called again"


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain data with every interpolation resolved, but for what comes from the environment.

    ``${oc.env:…}`` stays as it is, also inside other text: each rank resolves it when it uses it, so a
    secret reaches no file and no other process. Only numbers, switches and choices of ours are resolved here, for
    they are checked here and are the same on all ranks.

    Raises:
        RequestError: a value is missing or an integer that no machine takes, or an interpolation has no target.
    """
    given = [*_values(OmegaConf.to_container(config, enum_to_str=True))]
    for key, value in given:
        if type(value) is int and value.bit_length() > 63:
            raise RequestError(f"{key} is an integer of {value.bit_length() + 1} bits. Allowed: those of 64 bits.")
    if missing := [key for key, value in given if value == "???"]:
        them = "it" if len(missing) == 1 else "them"
        raise RequestError(f"{', '.join(missing)} must be given: this choice has no default for {them}.")
    plain = _plain(config)
    found = _of_environment(RunSettings, plain)
    sections = get_type_hints(Request)
    for name in _TYPED:
        if isinstance(plain.get(name), dict) and (inside := _of_environment(sections[name], plain[name])):
            found[name] = inside
    return _plain(OmegaConf.merge(config, found)) if found else plain  # what follows these keys has their values, too


def _of_environment(settings: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values of a section that come from the environment, by their keys' types."""
    found = of_environment(get_type_hints(settings, include_extras=True), values)
    return {name: value for name, value in found.items() if value is not values[name]}


def _plain(config: Any) -> dict[str, Any]:
    with _environment_kept():
        try:
            plain = _with_texts(OmegaConf.to_container(config, resolve=True, enum_to_str=True))
        except InterpolationKeyError as error:
            raise _unfit(config, error) from None
        except OmegaConfBaseException as error:
            raise RequestError(f"{error.full_key}: {_first_line(error)}") from None
    assert isinstance(plain, dict)
    for key, value in _values(plain):
        if not isinstance(value, (str, int, float, NoneType)):
            raise RequestError(
                f"{key} is of the type {type(value).__name__}. Allowed: texts, numbers, true, false, null."
            )
    return {str(name): value for name, value in plain.items()}


def _with_texts(value: Any) -> Any:
    """Return plain data with the paths of a user's structured configs as texts, as their enums are."""
    if isinstance(value, dict):
        return {name: _with_texts(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_texts(each) for each in value]
    return str(value) if isinstance(value, PurePath) else value


def _values(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of what is no section, each with its value; of a list all values."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield from _values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list):
        for value in config:
            yield from _values(value, key)
    else:
        yield key, config


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Let ``oc.env`` give back its own text, and ``oc.decode`` leave such text alone, while inside."""

    def env(*arguments: Any) -> str:
        return "${oc.env:" + ",".join("null" if value is None else str(value) for value in arguments) + "}"

    def decode(text: str | None, _parent_: Container, _node_: Node) -> Any:
        if text is not None and "${oc.env:" in text:
            return "${oc.decode:" + text + "}"
        return oc.decode(text, _parent_, _node_)

    register_resolver("oc.env", env, replace=True)
    register_resolver("oc.decode", decode, replace=True)
    try:
        yield
    finally:
        register_resolver("oc.env", oc.env, replace=True)
        register_resolver("oc.decode", oc.decode, replace=True)


def _unfit(config: DictConfig, error: InterpolationKeyError) -> RequestError:
    """Say which choice needs what the other one does not have: an image model on a table, say."""
    wanted = missing_interpolation_key(error) or _first_line(error)
    section = wanted.split(".")[0]
    if section not in config:
        return RequestError(
            f"{error.full_key} follows {wanted}, and there is no key {section}.{nearest(section, map(str, config))}"
        )
    have = [f"{section}.{name}" for name in config[section]]
    return RequestError(
        f"{error.full_key} follows {wanted}, which this choice of {section} does not have.{nearest(wanted, have)} "
        f"Choose another {section}, or set {error.full_key} yourself."
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


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


def info_is_requested(args: Namespace) -> bool:
    """Whether the command line asks Hydra something (``--help``, ``--cfg job``, …) instead of running."""
    return bool(args.help or args.hydra_help or args.cfg or args.info or args.shell_completion)


def show_info(parser: ArgumentParser, args: Namespace, config_path: str, config_name: str) -> None:
    """Print Hydra's answer, from the search path that runs have.

    Raises:
        RequestError: as for a run.
    """
    config_dir: str | None = args.config_dir
    line = os.environ.get("COMP_LINE", "")
    if args.shell_completion:  # by a regex, for the line to be completed may end anywhere
        words: dict[str, str] = dict(re.findall(r"(--config-dir|-cd|--config-name|-cn)[ =](\S+)(?= )", line))
        config_dir = words.get("--config-dir") or words.get("-cd")
        config_name = words.get("--config-name") or words.get("-cn") or config_name
    with session(config_path, config_dir) as hydra, translated(hydra, config_name, args.overrides):
        try:
            if args.shell_completion:
                hydra.shell_completion(config_name, args.overrides)
            elif args.help:
                hydra.app_help(config_name, parser, args)
            elif args.hydra_help:
                hydra.hydra_help(config_name, parser, args)
            elif args.cfg:
                overrides = deleting_null(hydra, config_name, args.overrides)
                hydra.show_cfg(config_name, overrides, args.cfg, args.package, args.resolve)
            else:
                hydra.show_info(args.info, config_name, args.overrides)
        except ValueError as error:  # there is no completion for this shell
            raise RequestError(f"{error}") from None
