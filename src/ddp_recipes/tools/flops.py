"""``trainer.peak_flops``: operations of the model are counted, and logged beside what its devices can do."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddp_recipes.build.model import BuiltTask
from ddp_recipes.build.recipe import Recipe
from ddp_recipes.data.loader import Batch, Loader
from ddp_recipes.devices import HOST, is_accelerator, name
from ddp_recipes.runtime.tensors import tensors_in
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.fake import fake_batch, new_mode, without_data
from ddp_recipes.training.clock import Flops
from ddp_recipes.training.state import Run, Update


def count(built: BuiltTask, loader: Loader | None, in_first_step: bool) -> None:
    """Count the operations of a sample: as the model is made, before what it is run with changes it.

    Args:
        in_first_step: whether the first step computes all that counts, and no more, in this process.
    """
    reason = "the task brings the data, or attaches itself to the run"
    if loader is not None and type(built.task).attach is Task.attach:
        size, sample = max(1, loader.plan.size(0, 0)), None
        try:
            sample = loader.sample(size)
            built.flops = count_flops(built.task, sample) / size
            return
        except Exception as error:  # noqa: BLE001 - of any kind, where the step's flow depends on values
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            # Torch's counter fails with them, and with it the step.
            in_first_step = in_first_step and not any(each.is_nested for each in tensors_in(sample))
    built.counts_first_step = in_first_step
    if not in_first_step:
        built.warnings.append(f"trainer.peak_flops: the model's operations could not be counted ({reason}).")


def follow(run: Run, recipe: Recipe) -> None:
    """Have a run log its operations; rank 0's, which logs, counts them in the first step where that is the way."""
    if recipe.built.flops is not None:
        run.flops = of_run(recipe, recipe.built.flops)
    if not (recipe.built.counts_first_step and recipe.world.is_main):
        return
    if recipe.strategy.replicas(recipe.device.type) > 1:  # each in a thread, in which nobody counts
        recipe.warnings.append("trainer.peak_flops: the operations of several devices of a process cannot be counted.")
        return
    run.update = counted(run.update, partial(of_run, recipe))


def of_run(recipe: Recipe, of_sample: float) -> Flops:
    """Return floating-point operations of a sample, beside those of all devices in a second."""
    peak = recipe.trainer.peak_flops
    of_one = peak_flops(recipe.device, recipe.trainer.precision) if peak == "auto" else peak
    devices = recipe.replicas * recipe.devices_per_replica
    return Flops(of_sample, None if of_one is None else float(of_one) * devices)


def counted(
    step: Callable[[Run, Iterator[Batch], bool], Update], flops: Callable[[float], Flops]
) -> Callable[..., Update]:
    """Return a step that counts what this process computes in it, for the samples that it has; the others do not.

    Args:
        step: the run's.
        flops: returns what the run logs of the operations of a sample.
    """

    def first(run: Run, batches: Iterator[Batch], measured: bool) -> Update:
        with FlopCounterMode(display=False) as counter:
            update = step(run, batches, measured)
        plan, batch = run.train.plan, run.cursor.batch
        numbers = range(batch, min(batch + run.trainer.accumulate_grad_batches, len(run.train)))
        if samples := sum(plan.size(number, shard) for number in numbers for shard in run.train.shards):
            run.update, run.flops = step, flops(counter.get_total_flops() / samples)
        return update

    return first


def count_flops(task: Task, batch: Any) -> int:
    """Return the operations of the forward and the backward pass of a training step, on a copy of the task.

    They are the model's: what is computed again for want of memory is not counted, and attention as if nothing in it
    was masked.

    Args:
        batch: one of the size to count for.

    Raises:
        Exception: of any kind, where the step needs values.
    """
    mode, host = new_mode(), torch.device(HOST)
    copied = without_data(task, {}, [host], mode)
    with mode, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        copied.training_step(fake_batch(batch, host)).loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


# Operations a second of products of 16 bits, dense, as makers state them; with TF32 NVIDIA's have half of it.
_PEAKS = {
    "H100 PCIe": (756e12, 51e12),  # and of float32 by itself
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "MI300X": (1307e12, 163.4e12),
}


def known_peak(name: str, precision: str, products: str) -> float | None:
    """Return the floating-point operations a second that a device does at most, by its maker; ``None``: not known.

    Args:
        name: as the maker calls it.
        precision: as ``trainer.precision``.
        products: how exact those of float32 are, as :func:`torch.get_float32_matmul_precision` says.
    """
    words = name.replace("-", " ")
    half, full = next((peak for part, peak in _PEAKS.items() if f" {part} " in f" {words} "), (None, None))
    if half is None or precision == "64-true":
        return None
    if precision != "32-true":
        return half
    return full if products == "highest" or "NVIDIA" not in name else half / 2


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return :func:`known_peak` of a device, as products are now."""
    return known_peak(name(device), precision, torch.get_float32_matmul_precision()) if is_accelerator(device) else None
