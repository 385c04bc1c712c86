"""Where numbers go. ``Logger`` drops them: every rank but 0 has it, and so has ``logger=none``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.files import read_text, write_aside

if TYPE_CHECKING:
    from torch import Tensor, nn

Parameter = bool | int | float | str
"""The value of a hyper-parameter."""


def folder_name(name: str) -> str:
    """Return the folder of a logger that is called so: ``lines`` for ``LinesLogger``."""
    return (name.removesuffix("Logger") or name).lower()


def picture_in(folder: Path, tag: str) -> Path:
    """Return the file of a picture, in a folder that is there, whatever the tag: metrics may be called ``../x``."""
    parts = [re.sub(r"[^\w.+=@() -]", "_", part).lstrip(".") or "_" for part in tag.split("/")]
    path = folder.joinpath(*parts[:-1], f"{parts[-1]}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def require(package: str, section: str, target: str) -> None:
    """Refuse a logger whose package is not installed; ``ddp-recipes`` has an extra of the package's name.

    Raises:
        RequestError: says what to install.
    """
    if find_spec(package) is None:
        raise RequestError(
            f"{section} is a {target}, which needs the package {package}, and it is not installed. Install "
            f"ddp-recipes[{package}], or choose another logger."
        )


def kept_id(directory: Path, new: Callable[[], str]) -> str:
    """Return the id of the run in a tracker: that of an earlier start, or a new one, which the folder keeps."""
    path = directory / "run_id"
    if not path.exists():
        write_aside(path, lambda file: file.write(new().encode()), durable=False)
    return read_text(path)


class Logger:
    """Write nothing; a base for loggers that do.

    Attributes:
        folder: the name of its own folder in the run directory. A class that does not set it, nor inherits it from a
            logger that does, gets its own name: ``lines`` for ``LinesLogger``.
    """

    folder: ClassVar[str] = ""

    @property
    def experiment(self) -> Any:
        """The object of another package that it writes by, such as TensorBoard's ``SummaryWriter``, or ``None``."""
        return None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.folder:
            cls.folder = folder_name(cls.__name__)

    @classmethod
    def check(cls, section: str, keys: Mapping[str, Any]) -> None:
        """Refuse what cannot work, before anything is written; ``keys`` are those of the config's ``section``.

        Raises:
            RequestError: says what to install or to change.
        """

    def __init__(self, directory: str | Path | None = None, purge_step: int | None = None) -> None:
        """Take what every logger is given: its folder, and on resume the first step that will be logged again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Logger:
        """Return the logger itself: a copy of a task logs to where the task does."""
        return self

    def parameters(self, params: Mapping[str, Parameter]) -> None:
        """Record, at each start, what the run is given; for loggers that do not wait for :meth:`hparams`."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers by name at the optimizer step ``step``."""

    def of_batch(self, values: Mapping[str, float], batch: int, step: int) -> None:
        """Record numbers of one batch of an evaluation, at its number among those of all evaluations.

        A resumed run counts on from its checkpoint: what has smaller numbers does not come again.

        Args:
            step: how many optimizer steps are done.
        """
        self.scalars(values, batch)

    def go_on(self, batches: Mapping[str, int]) -> None:
        """Keep, as a run goes on, what :meth:`of_batch` got of these names for numbers before these, of earlier starts.

        It may not be called for them any more.
        """

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

    def finish(self, status: str) -> None:
        """Record how the run ends: ``finished``, ``failed`` or ``preempted``. Not called where a kill ends it."""

    def close(self) -> None:
        """Flush, and write no more."""

    def see_with(self, run_directory: str) -> str | None:
        """Return the command that shows what was logged, for the summary on the terminal, or ``None`` for no line."""
        return None


def _of_each(name: str) -> Any:
    """Return a method that calls that of each logger."""

    def method(self: Loggers, *arguments: Any, **options: Any) -> None:
        for logger in self.loggers:
            getattr(logger, name)(*arguments, **options)

    return method


class Loggers(Logger):
    """Give everything to several loggers, in their order."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.loggers = tuple(loggers)

    @property
    def experiment(self) -> Any:
        """The object behind the first logger that has one, such as a ``SummaryWriter``."""
        return next((each.experiment for each in self.loggers if each.experiment is not None), None)

    parameters = _of_each("parameters")
    scalars = _of_each("scalars")
    of_batch = _of_each("of_batch")
    go_on = _of_each("go_on")
    text = _of_each("text")
    hparams = _of_each("hparams")
    graph = _of_each("graph")
    image = _of_each("image")
    flush = _of_each("flush")
    finish = _of_each("finish")

    def close(self) -> None:
        with ExitStack() as stack:  # if one fails, the others still close
            for logger in reversed(self.loggers):
                stack.callback(logger.close)

    def see_with(self, run_directory: str) -> str | None:
        """Return the commands of those that have one, one a line."""
        lines = (logger.see_with(run_directory) for logger in self.loggers)
        return "\n".join(line for line in lines if line is not None) or None
