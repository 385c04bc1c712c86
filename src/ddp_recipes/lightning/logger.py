"""What a module written for Lightning sees as ``self.logger``."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from ddp_recipes.loggers import Loggers
from ddp_recipes.tasks import Task

if TYPE_CHECKING:
    from ddp_recipes.lightning.trainer import Trainer

_PACKAGES = ("lightning.pytorch.loggers", "pytorch_lightning.loggers")


class ModuleLogger:
    """What a module sees as ``self.logger``: a logger of the run by Lightning's names.

    It is an instance of Lightning's logger of the same name, for modules that ask before they log a picture. That is
    looked up where Lightning has been loaded, not loaded.

    Args:
        number: of the logger, among those of the run.
    """

    def __init__(self, trainer: Trainer, task: Task, number: int = 0) -> None:
        self._trainer, self._task, self._number = trainer, task, number

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.__class__, name, None) if name.startswith("log_") else None
        if method is not None:
            return partial(method, self)  # Lightning's own, such as W&B's log_image, which ends in log_metrics
        there = ", ".join(each for each in vars(ModuleLogger) if not each.startswith("_"))
        raise AttributeError(
            f"logger.{name} is not there under task=lightning. There are: {there}; experiment is the logger's own."
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of Lightning that it stands for, on all ranks."""
        context = vars(self._trainer).get("run_context")
        names = () if context is None else context.loggers
        loaded = tuple(package for package in _PACKAGES if package in sys.modules)
        return _class_of(names[self._number].lower(), loaded) if self._number < len(names) else ModuleLogger

    @property
    def _logger(self) -> Any:
        """Our logger, which drops all on other ranks than 0."""
        logger = self._task.logger
        return logger.loggers[self._number] if isinstance(logger, Loggers) else logger

    @property
    def experiment(self) -> Any:
        """The logger's own object, such as TensorBoard's ``SummaryWriter``; one that drops all on other ranks.

        Of one that has none, such as a CSV file, it is that of the first logger that has one.
        """
        return self._logger.experiment or self._task.logger.experiment or _Dropping()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at a step, the present one by default; at that what else W&B and its like take."""
        media = {name: value for name, value in metrics.items() if not _is_number(value)}
        media = media if hasattr(self.experiment, "log") else {}
        values = {name: float(value) for name, value in metrics.items() if name not in media}
        if values:
            self._logger.scalars(values, self._trainer.global_step if step is None else step)
        if media:
            self.experiment.log(media, step=self._trainer.global_step)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Log them as a text: HParams shows those of the config."""
        given = vars(params) if isinstance(params, Namespace) else dict(params)
        lines = [f"- {name}: {value}" for name, value in given.items()]
        self._logger.text("hyper_parameters", "\n".join(lines))

    def log_graph(self, *_: Any, **__: Any) -> None:
        """``logger.graph=true`` does it."""

    def save(self) -> None:
        """Write out what is held back."""
        self._logger.flush()

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return self._trainer.default_root_dir

    log_dir = root_dir = save_dir

    @property
    def name(self) -> str:
        return Path(self.save_dir).name

    @property
    def run_id(self) -> str | None:
        """The id of the run in a tracker that gives it one; ``None`` on other ranks than 0."""
        found = getattr(self._logger, "run_id", None) or getattr(self._logger.experiment, "id", None)
        return None if found is None else str(found)

    @property
    def version(self) -> str:
        """The same; empty where there is none."""
        return self.run_id or ""


def _is_number(value: Any) -> bool:
    return isinstance(value, SupportsFloat) and not isinstance(value, str)


@cache
def _class_of(name: str, packages: tuple[str, ...]) -> type:
    """Return Lightning's logger of that name, of all packages where there are two; ours where it has none."""
    classes = [
        each
        for package in packages
        for each in vars(sys.modules[package]).values()
        if isinstance(each, type) and each.__name__.lower() == name
    ]
    return classes[0] if len(classes) == 1 else type(name, tuple(classes), {}) if classes else ModuleLogger


class _Dropping:
    """Takes any call, also of what it is asked for, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop it."""
