"""What torchmetrics keeps private: where its metrics are, what a batch has given them, and their states over ranks.

And of Lightning, how an epoch of a ``CombinedLoader`` ends, and what a module's ``save_hyperparameters`` was given.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn


def batch_value(metric: Any) -> Tensor | None:
    """Return the value that a call of the metric gave, or ``None`` where it was only updated.

    ``Metric._forward_cache``.
    """
    value = getattr(metric, "_forward_cache", None)
    return value if isinstance(value, Tensor) else None


def metrics_in(module: nn.Module) -> dict[str, Any]:
    """Return torchmetrics' metrics in a module, those in a ``MetricCollection`` one by one: ``_update_count``."""
    return {
        name: each
        for name, each in module.named_modules()
        if hasattr(each, "metric_state") and hasattr(each, "_update_count")
    }


def is_updated(metric: Any) -> bool:
    """Whether a metric of torchmetrics has taken in a batch since it was reset: ``_update_count``."""
    return bool(metric._update_count > 0)


def as_it_is(metric: Any) -> Callable[[], None]:
    """Return what leaves a metric as it is now on this rank, by ``_update_count`` and ``_computed``.

    Of states that are lists, whose items stay as they are, the lists alone are copied.
    """
    updates, computed = metric._update_count, metric._computed
    states = {
        name: [*value] if isinstance(value, list) else value.clone() for name, value in metric.metric_state.items()
    }

    def put_back() -> None:
        for name, value in states.items():
            setattr(metric, name, value)
        metric._update_count, metric._computed = updates, computed

    return put_back


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


def is_combined(loaders: Any) -> bool:
    """Whether this is Lightning's ``CombinedLoader``, under whichever name it was installed."""
    return type(loaders).__name__ == "CombinedLoader"


def mode_of(loaders: Any) -> str:
    """Return how an epoch of several loaders ends: ``CombinedLoader._mode``; without one, as by Lightning's default."""
    return str(loaders._mode) if is_combined(loaders) else "max_size_cycle"


def argument_of_hparams(module: Any) -> str | None:
    """Return the argument that held all hyper-parameters, as ``args``, by its name: ``_hparams_name``."""
    name = getattr(module, "_hparams_name", None)
    return name if isinstance(name, str) else None
