"""Pictures that a run leaves behind, where matplotlib is installed."""

from io import BytesIO
from typing import Any


def as_png(figure: Any, dpi: int = 110) -> bytes:
    """Return a figure of matplotlib as a PNG."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()
