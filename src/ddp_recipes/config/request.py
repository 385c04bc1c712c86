"""What is requested of a run, checked as far as that needs no torch: the parent does it before anything starts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from types import NoneType
from typing import Any, get_type_hints

from omegaconf import Container, DictConfig, Node, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_recipes._compat.hydra_ import register_resolver
from ddp_recipes._compat.messages import missing_interpolation_key
from ddp_recipes.config import targets
from ddp_recipes.config.keys import of_environment, parse
from ddp_recipes.config.parallelism import StrategySettings, strategy_settings
from ddp_recipes.config.settings import (
    CheckpointSettings,
    ClusterSettings,
    DataSettings,
    LauncherSettings,
    ModelSettings,
    ResumeSettings,
    RunSettings,
    TrainerSettings,
    launcher_settings,
)
from ddp_recipes.devices import HOST, Found, missing, refuse_on_host
from ddp_recipes.errors import RequestError, nearest

GROUPS = ("data", "model", "task", "optimizer", "scheduler", "strategy", "launcher", "trainer", "logger", "checkpoint")
SECTIONS: dict[str, type] = {  # whose keys have types that follow from no other key
    "data": DataSettings,
    "trainer": TrainerSettings,
    "checkpoint": CheckpointSettings,
    "launcher": LauncherSettings,
    "model": ModelSettings,
    "cluster": ClusterSettings,
}


@dataclass(frozen=True)
class Request:
    """The checked keys of a config, and the layout of processes that follows from them."""

    run: RunSettings
    data: DataSettings
    trainer: TrainerSettings
    checkpoint: CheckpointSettings
    launcher: LauncherSettings
    resume: ResumeSettings
    model: ModelSettings
    cluster: ClusterSettings
    strategy: StrategySettings

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Request":
        """Check a resolved config.

        Raises:
            RequestError: a section, key or value is not allowed, or it names what no config may call.
        """
        targets.check(config)
        for group in GROUPS:
            if not isinstance(config.get(group), Mapping):
                raise RequestError(
                    f"The config has no section {group}. Choose an option of the group, e.g. in the defaults "
                    f"list of your primary config (conf/train.yaml lists them all)."
                )
        if not isinstance(config["model"].get("_target_"), str):
            raise RequestError("model has no _target_, the dotted name of a class or function to call.")
        request = cls(
            run=parse(RunSettings, "", config, others=True),
            data=parse(DataSettings, "data", config["data"], others=True),
            trainer=parse(TrainerSettings, "trainer", config["trainer"]),
            checkpoint=parse(CheckpointSettings, "checkpoint", config["checkpoint"]),
            launcher=launcher_settings(config),
            resume=parse(ResumeSettings, "resume", config.get("resume", {"strict": True})),
            model=parse(ModelSettings, "model", config["model"], others=True),
            cluster=parse(ClusterSettings, "cluster", config.get("cluster") or {}),
            strategy=strategy_settings(config["strategy"]),
        )
        if request.strategy.pipeline is None:
            request.model.check_split(request.model.num_devices, "model.num_devices")
        request.strategy.check(request)
        return request

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.model.num_devices

    def device_type(self, found: Found) -> str:
        """Return torch's word for what a run is on, given what this machine has.

        Raises:
            RequestError: devices are requested and none is available, or a backend for them on a CPU.
        """
        asked = self.launcher.device
        if asked not in ("auto", HOST) and not found.count:
            raise RequestError(missing(asked))
        kind = asked if asked != "auto" else found.type
        if kind == HOST:
            refuse_on_host(self.launcher.backend)
        return kind

    def processes(self, found: Found) -> int:
        """Return how many local processes to start on a machine with these devices.

        Raises:
            RequestError: they do not fit, or the strategy cannot have so many.
        """
        if self.launcher.nnodes > 1:
            raise RequestError(
                f"launcher.nnodes={self.launcher.nnodes}, but the local launcher starts processes on this "
                f"machine only. Start train.py with torchrun on each node, or use launcher=slurm; both take the same "
                f"overrides."
            )
        processes = self.processes_on_node(found)
        self.launcher.check_processes(processes)
        self.strategy.check_world_size(processes)
        return processes

    def processes_on_node(self, found: Found) -> int:
        """Return how many processes one node with these devices gets."""
        requested, k, gpus = self.launcher.nproc_per_node, self.num_devices, found.count
        fit = gpus // k if self.device_type(found) != HOST else None
        if fit is not None and k * (1 if requested == "auto" else int(requested)) > gpus:
            raise RequestError(
                f"{'One replica' if requested == 'auto' else f'{requested} replicas'} of {k} device(s) "
                f"(model.num_devices) cannot run on {gpus} visible GPU(s): {fit} fit(s). Use "
                f"launcher.nproc_per_node={max(fit, 1)}"
                f"{'' if gpus >= k else ' on a machine with more GPUs'}, or launcher.device=cpu."
            )
        if requested != "auto":
            return int(requested)
        processes = self.strategy.auto_processes(fit)
        if fit is not None and processes > fit and self.cluster.nnodes is None:
            raise RequestError(
                f"One replica takes {processes} processes of {k} GPU(s) each, and {gpus} GPU(s) are visible. Use "
                f"fewer stages, or launcher.device=cpu."
            )
        return processes


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
    for name, settings in SECTIONS.items():
        if isinstance(plain.get(name), dict) and (inside := _of_environment(settings, plain[name])):
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
