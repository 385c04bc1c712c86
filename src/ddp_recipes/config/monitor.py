"""Which way a metric gets better, by its name; loads no torch, so that a sweep can ask, too."""

import re
from collections.abc import Collection
from typing import Literal

from ddp_recipes.errors import RequestError, nearest, not_one_of

Mode = Literal["min", "max"]

_LOWER = re.compile("cer|entropy|err|error|fid|loss|mae|mape|mse|nll|perplexity|ppl|rmse|wer")
_HIGHER = re.compile(
    "acc|accuracy|ap|auc|auroc|bleu|dice|f1|iou|jaccard|map|miou|precision|psnr|r2|recall|rouge|specificity|ssim"
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")  # of a name such as MulticlassF1Score


def better(metric: str) -> Mode | None:
    """Return whether a metric is better when it is lower or higher; ``None`` where its name does not tell.

    The last word that tells counts: ``val/f1_loss`` is a loss. So do the words in a class's name, ``BinaryF1Score``.
    """
    for name in reversed(re.split(r"[^A-Za-z0-9]+", metric)):
        for word in (name, *reversed(_WORDS.findall(name))):
            if _LOWER.fullmatch(word.lower()):
                return "min"
            if _HIGHER.fullmatch(word.lower()):
                return "max"
    return None


def resolved(mode: str, metric: str, key: str) -> Mode:
    """Return the mode, ``auto`` resolved by the metric's name.

    Args:
        key: where the mode is set, for messages.

    Raises:
        RequestError: the mode is none, or the name does not tell.
    """
    if mode not in ("auto", "min", "max"):
        raise not_one_of(key, mode, ("auto", "min", "max"))
    found: Mode | None = better(metric) if mode == "auto" else "min" if mode == "min" else "max"
    if found is None:
        raise RequestError(
            f"{key}=auto, and the name {metric} does not tell whether lower or higher is better. Set {key}=min or max."
        )
    return found


def check_measured(monitor: str, metrics: Collection[str], key: str = "checkpoint.monitor") -> None:
    """Refuse a metric to monitor that nothing measures.

    Raises:
        RequestError: lists the metrics there are.
    """
    if monitor not in metrics:
        raise RequestError(
            f"{key}={monitor} is not measured. Measured are: {', '.join(sorted(metrics))}.{nearest(monitor, metrics)}"
        )
