"""What is requested of a run, checked as far as that needs no torch: the parent does it before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_recipes.config import targets
from ddp_recipes.config.keys import parse
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
from ddp_recipes.errors import RequestError

GROUPS = ("data", "model", "task", "optimizer", "scheduler", "strategy", "launcher", "trainer", "logger", "checkpoint")


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
