"""Callbacks written for Lightning."""

from collections.abc import Mapping
from typing import Any

from ddp_recipes.callbacks import Callback
from ddp_recipes.errors import RequestError

# Classes of Lightning that reach into its own loop, and what to use instead.
_INSTEAD = {
    "Checkpoint": "the group checkpoint (checkpoint.monitor, save_top_k, every_n_steps, …)",
    "ProgressBar": "trainer.progress",
    "GradientAccumulationScheduler": "callbacks=gradient_accumulation",
    "StochasticWeightAveraging": "callbacks=ema",
    "WeightAveraging": "callbacks=ema",
    "BatchSizeFinder": "tune=batch_size",
    "LearningRateFinder": "tune=lr",
    "DeviceStatsMonitor": "debug=profiler",
    "ThroughputMonitor": "train/samples_per_second, which is logged anyhow",
    "Timer": "trainer.max_time",
    "ModelPruning": "torch.nn.utils.prune in a callback of your own",
    "SpikeDetection": "trainer.detect_anomaly",
}


def refuse_callback(name: str, made: object) -> None:
    """Refuse a callback that works on Lightning's own loop.

    Raises:
        RequestError: says what to use instead.
    """
    for each in type(made).__mro__:
        if each.__module__.startswith(("lightning.", "pytorch_lightning.")) and each.__name__ in _INSTEAD:
            raise RequestError(
                f"callbacks.{name} is Lightning's {type(made).__name__}, which reaches into Lightning's own loop. Use "
                f"{_INSTEAD[each.__name__]} instead."
            )


class Wrapped(Callback):
    """A callback of Lightning as one of the run's: its hooks are called with the module's; here is its state."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def state(self) -> dict[str, Any]:
        return dict(getattr(self.callback, "state_dict", dict)())

    def load_state(self, state: Mapping[str, Any]) -> None:
        if hasattr(self.callback, "load_state_dict"):
            self.callback.load_state_dict(dict(state))
