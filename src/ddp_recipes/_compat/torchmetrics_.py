"""What a metric of torchmetrics was for its latest batch."""

from typing import Any

from torch import Tensor


def batch_value(metric: Any) -> Tensor | None:
    """Return the value that a call of the metric gave, or ``None`` where it was only updated.

    ``Metric._forward_cache``.
    """
    value = getattr(metric, "_forward_cache", None)
    return value if isinstance(value, Tensor) else None
