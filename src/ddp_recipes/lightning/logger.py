"""What a module written for Lightning sees as ``self.logger``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_recipes.tasks import Task

if TYPE_CHECKING:
    from ddp_recipes.lightning.trainer import Trainer


class ModuleLogger:
    """What a module sees as ``self.logger``: the run's loggers by Lightning's names."""

    version = ""

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._trainer, self._task = trainer, task

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"logger.{name} is not there under task=lightning. There are: "
            f"{', '.join(each for each in dir(self) if not each.startswith('_'))}; experiment is the logger's own."
        )

    @property
    def experiment(self) -> Any:
        """The first logger's own object, such as TensorBoard's ``SummaryWriter``; one that drops all on other ranks."""
        return self._task.logger.experiment or _Dropping()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers at a step, the present one by default."""
        values = {name: float(value) for name, value in metrics.items()}
        self._task.logger.scalars(values, self._trainer.global_step if step is None else step)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Log them as a text: HParams shows those of the config."""
        given = vars(params) if isinstance(params, Namespace) else dict(params)
        lines = [f"- {name}: {value}" for name, value in given.items()]
        self._task.logger.text("hyper_parameters", "\n".join(lines))

    def log_graph(self, *_: Any, **__: Any) -> None:
        """``logger.graph=true`` does it."""

    def save(self) -> None:
        """Write out what is held back."""
        self._task.logger.flush()

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return self._trainer.default_root_dir

    log_dir = root_dir = save_dir

    @property
    def name(self) -> str:
        """The run directory's name."""
        return Path(self.save_dir).name


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
