"""Metrics that compute themselves over batches and ranks, and those of training batches."""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_recipes._compat.torchmetrics_ import list_states
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.loggers import Logger
from ddp_recipes.strategies.collectives import broadcast, gather
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.task import is_stateful
from ddp_recipes.training.non_finite import Losses
from ddp_recipes.training.state import Metrics, Run

Matrices = dict[str, Tensor]  # by the names of metrics


def computed(task: Task, prefix: str, matrices: Matrices) -> Metrics:
    """Return what a task's torchmetrics come to over all ranks. A collective.

    Args:
        matrices: gets those that are square matrices.

    Raises:
        RequestError: one is neither a number nor a square matrix, or matplotlib, which draws it, is not installed.
    """
    metrics: Metrics = {}
    with warnings.catch_warnings():
        # torchmetrics warns of a metric without an update; a rank without a sample is no mistake.
        warnings.filterwarnings("ignore", "The ``compute`` method", UserWarning)
        agree_on_lists(task.stateful_metrics.values())
        values = {name: metric.compute() for name, metric in task.stateful_metrics.items()}
    for name, value in values.items():
        for own, each in value.items() if isinstance(value, Mapping) else [(name, value)]:
            if _is_matrix(each):
                matrices[task.metric_name(prefix, own)] = each
            elif (isinstance(each, Tensor) and each.numel() != 1) or isinstance(each, (tuple, list)):
                shape = f"a tensor {list(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
                raise RequestError(
                    f"task.metrics.{own} computes {shape}. Allowed: a number, and a square matrix, which is drawn. Ask "
                    f"the metric for one number, e.g. by average: macro, or wrap it in torchmetrics.ClasswiseWrapper."
                )
            else:
                metrics[task.metric_name(prefix, own)] = float(each)
    if matrices and find_spec("matplotlib") is None:
        raise RequestError(
            f"{', '.join(matrices)} is a matrix, which matplotlib draws, and it is not installed. Install "
            f"ddp-recipes[figures], or leave the metric out."
        )
    return metrics


def agree_on_lists(metrics: Iterable[Any]) -> None:
    """Give metrics without a sample on this rank empty lists of what others have, to be gathered. A collective.

    Else torchmetrics sends an empty list as one of floats, which others do not expect.
    """
    lists = list_states(metrics)
    if not lists or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    first = [next(iter(getattr(owner, name)), None) for owner, name in lists]
    mine = [[each[:0] if each.dim() else each[None][:0]] if isinstance(each, Tensor) else [] for each in first]
    every: list[list[list[Tensor]]] = broadcast(gather(mine), 0)
    for (owner, name), kinds in zip(lists, zip(*every, strict=True), strict=True):
        if not getattr(owner, name):
            setattr(owner, name, [each.to(owner.device) for kind in kinds for each in kind][:1])


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == value.shape[1] > 1


def log_matrices(matrices: Matrices, logger: Logger, is_main: bool) -> None:
    """Log a picture of each on the rank that writes."""
    if matrices and is_main:
        from ddp_recipes.reporting.figures.matrix import draw_matrix

        logging.getLogger("matplotlib").setLevel(logging.WARNING)
        for name, matrix in matrices.items():
            logger.image(name, draw_matrix(matrix.tolist(), name))


def mean_loss(run: Run, losses: Sequence[Losses], samples: int) -> Tensor:
    """Return the mean loss over a step's samples of all ranks, given those of this rank's shards. A collective."""
    zero = torch.zeros((), dtype=torch.float64, device=run.devices[-1])
    sums = [sum((loss.double() * count for loss, count in shard if count), zero) for shard in losses]
    return run.strategy.sum(torch.stack(sums) / samples)


def train_metrics(run: Run, losses: Sequence[Losses], samples: int, sums: Sequence[Mapping[str, Tensor]]) -> Metrics:
    """Return the task's metrics of the batch of a step, over all its samples. A collective where they are measured.

    Args:
        sums: of each metric, over the samples of each of this rank's shards; empty where they are not measured.

    Raises:
        RunFailed: the task's own step does not measure them.
    """
    if not sums:
        return {}
    task = run.task
    names = [name for name, metric in task.metrics.items() if not is_stateful(metric)]
    for of_shard, measured in zip(losses, sums, strict=True):
        if measured.keys() != set(names) and any(size for _, size in of_shard):
            raise RunFailed(
                f"task.train_metrics=true, but {type(task).__name__}.training_step does not measure. Let it return "
                f"self.training_output(outputs, targets), or leave task.train_metrics out."
            )
    found: Metrics = {}
    if names:
        zero = torch.zeros((), dtype=torch.float64, device=run.devices[-1])
        rows = [torch.stack([measured.get(name, zero).to(zero) for name in names]) for measured in sums]
        totals = run.strategy.sum(torch.stack(rows)) / samples
        found = {f"train/{name}": value for name, value in zip(names, totals.tolist(), strict=True)}
    return found | computed(task, "train", {})
