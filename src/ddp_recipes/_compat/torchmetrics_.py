"""What a metric of torchmetrics was for its latest batch, and its state."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor


def batch_value(metric: Any) -> Tensor | None:
    """Return the value that a call of the metric gave, or ``None`` where it was only updated.

    ``Metric._forward_cache``.
    """
    value = getattr(metric, "_forward_cache", None)
    return value if isinstance(value, Tensor) else None


def is_updated(metric: Any) -> bool:
    """Whether something is a metric of torchmetrics that has taken in a batch since it was reset: ``_update_count``."""
    return getattr(metric, "_update_count", 0) > 0 and hasattr(metric, "metric_state")


def updates_of(metric: Any) -> int:
    """Return how many batches a metric has taken in since it was reset: ``_update_count``."""
    return int(metric._update_count)


def put_back(metric: Any, updates: int, state: Mapping[str, Any]) -> None:
    """Leave a metric as it was, of which its state is known."""
    for name, value in state.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = updates, None


def state_of(metric: Any) -> dict[str, Any]:
    """Return the state of a metric over all ranks. A collective where there are several."""
    with metric.sync_context():
        states = {name: deepcopy(value) for name, value in metric.metric_state.items()}
    return {"updates": metric._update_count, "states": states}


def load_state(metric: Any, state: Mapping[str, Any], first: bool) -> None:
    """Restore it over all ranks: sums and lists on the ``first`` rank alone, for they will be added up again.

    ``Metric._reductions`` and ``_update_count``.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_sum  # loaded where there is a metric anyhow

    for name, value in state["states"].items():
        added_up = isinstance(value, list) or metric._reductions[name] in (dim_zero_sum, dim_zero_cat)
        if first or not added_up:
            setattr(metric, name, deepcopy(value))
    metric._update_count = state["updates"]


def list_states(metrics: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return each list that metrics, and those in them, keep of what they saw, as its owner and name: ``_reductions``.

    Where several ranks compute one they concatenate what all have, which must be alike but for its length.
    """
    owners = {id(owner): owner for metric in metrics for owner in metric.modules()}.values()
    return [
        (owner, name)
        for owner in owners
        for name in getattr(owner, "_reductions", ())
        if isinstance(getattr(owner, name), list)
    ]
