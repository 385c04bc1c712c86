"""Where numbers go. ``Logger`` drops them: every rank but 0 has it, and so has ``logger=none``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor, nn

Parameter = bool | int | float | str
"""The value of a hyper-parameter."""


def folder_name(name: str) -> str:
    """Return the folder of a logger that is called so: ``lines`` for ``LinesLogger``."""
    return (name.removesuffix("Logger") or name).lower()


class Logger:
    """Write nothing; a base for loggers that do.

    Attributes:
        folder: the name of its own folder in the run directory. A class that does not set it, nor inherits it from a
            logger that does, gets its own name: ``lines`` for ``LinesLogger``.
    """

    folder: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.folder:
            cls.folder = folder_name(cls.__name__)

    def __init__(self, directory: str | Path | None = None, purge_step: int | None = None) -> None:
        """Take what every logger is given: its folder, and on resume the first step that will be logged again."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers by name at the optimizer step ``step``."""

    def text(self, tag: str, text: str) -> None:
        """Record a text, read as Markdown."""

    def hparams(
        self, params: Mapping[str, Parameter], metrics: Mapping[str, float], chosen: Collection[str] = ()
    ) -> None:
        """Record, once and at the end, what the run was given and what came out; ``chosen`` ones are shown first."""

    def graph(self, model: nn.Module, inputs: Tensor) -> None:
        """Record the graph of ``model`` for one batch of ``inputs``, on the device of the model."""

    def image(self, tag: str, png: bytes) -> None:
        """Record a picture, a PNG."""

    def flush(self) -> None:
        """Write out what is held back."""

    def close(self) -> None:
        """Flush, and write no more."""

    def see_with(self, run_directory: str) -> str | None:
        """Return the command that shows what was logged, for the summary on the terminal, or ``None`` for no line."""
        return None


class Loggers(Logger):
    """Give everything to several loggers, in their order."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = tuple(loggers)

    def _each(self, method: str, *arguments: Any) -> None:
        for logger in self.loggers:
            getattr(logger, method)(*arguments)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._each("scalars", values, step)

    def text(self, tag: str, text: str) -> None:
        self._each("text", tag, text)

    def hparams(
        self, params: Mapping[str, Parameter], metrics: Mapping[str, float], chosen: Collection[str] = ()
    ) -> None:
        self._each("hparams", params, metrics, chosen)

    def graph(self, model: nn.Module, inputs: Tensor) -> None:
        self._each("graph", model, inputs)

    def image(self, tag: str, png: bytes) -> None:
        self._each("image", tag, png)

    def flush(self) -> None:
        self._each("flush")

    def close(self) -> None:
        with ExitStack() as stack:  # if one fails, the others still close
            for logger in reversed(self.loggers):
                stack.callback(logger.close)

    def see_with(self, run_directory: str) -> str | None:
        """Return the commands of those that have one, one a line."""
        lines = (logger.see_with(run_directory) for logger in self.loggers)
        return "\n".join(line for line in lines if line is not None) or None
