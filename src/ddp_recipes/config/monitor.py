"""Which way a metric gets better, by its name; loads no torch, so that a sweep can ask, too."""

import re
from typing import Literal

from ddp_recipes.errors import RequestError, not_one_of

Mode = Literal["min", "max"]

_LOWER = re.compile("cer|entropy|err|error|fid|loss|mae|mape|mse|nll|perplexity|ppl|rmse|wer")
_HIGHER = re.compile(
    "acc|accuracy|ap|auc|auroc|bleu|dice|f1|iou|jaccard|map|miou|precision|psnr|r2|recall|rouge|specificity|ssim"
)


def better(metric: str) -> Mode | None:
    """Return whether a metric is better when it is lower or higher; ``None`` where its name does not tell.

    The last word that tells counts: ``val/f1_loss`` is a loss.
    """
    for word in reversed(re.split(r"[^a-z0-9]+", metric.lower())):
        if _LOWER.fullmatch(word):
            return "min"
        if _HIGHER.fullmatch(word):
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
