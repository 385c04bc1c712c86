"""Pictures that a run leaves behind, where matplotlib is installed."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from ddp_recipes.loggers import Logger
from ddp_recipes.runtime.files import write_aside

log = logging.getLogger(__name__)


def leave_picture(directory: Path, logger: Logger, name: str, draw: Callable[[], bytes]) -> None:
    """Draw a picture into the run directory and the logger, or say why there is none.

    Args:
        draw: returns a PNG; it is called where matplotlib is installed.
    """
    if find_spec("matplotlib") is None:
        log.info("There is no %s.png: it takes matplotlib. Install ddp-recipes[figures] for it.", name)
        return
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    png = draw()
    write_aside(directory / f"{name}.png", lambda file: file.write(png))
    logger.image(name, png)


def as_png(figure: Any, dpi: int = 110) -> bytes:
    """Return a figure of matplotlib as a PNG."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()
