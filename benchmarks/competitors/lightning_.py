"""Lightning's ``Trainer``: with its defaults, with the loss logged and in the bar, and barebones.

With the option ``model_parallel`` or ``fsdp`` all ranks hold the model together, by the strategy of that name.
"""

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.competitors.journal import Journal
from benchmarks.competitors.place import Place
from benchmarks.competitors.sharded import shard
from benchmarks.player import Player

SHARDED = {
    "fsdp": lambda ranks: FSDPStrategy(),
    "model_parallel": lambda ranks: ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
}


class Module(lightning.LightningModule):
    """A workload as a user of Lightning writes it."""

    def __init__(self, place: Place, logs: bool) -> None:
        super().__init__()
        self.place, self.logs = place, logs
        self.model: nn.Module = place.workload.make_model(place.device)

    def configure_model(self) -> None:
        if self.place.seat.option == "model_parallel":
            shard(self.model, self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss: Tensor = self.place.workload.loss(self.model(inputs), targets)
        if self.logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.place.workload.make_optimizer(self.model)


class TakeTurns(lightning.Callback):
    """Waits before the first step and at the end of each turn."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.player: Player | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.player is None:
            self.player = self.place.player(module.model)
            self.player.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.player is not None
        if not self.player.step():
            trainer.should_stop = True


class KeepJournal(lightning.Callback):
    """Notes each step, for a run whose ranks are killed."""

    def __init__(self, place: Place) -> None:
        self.journal = Journal(place.seat, place.rank)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.journal.step(trainer.global_step, module.model)


def main() -> None:
    """Train until the referee has seen enough."""
    place = Place.mine()
    seat, workload = place.seat, place.workload
    trainer = lightning.Trainer(
        accelerator=seat.device,
        devices=seat.ranks,
        strategy=SHARDED[seat.option](seat.ranks) if workload.sharded else "ddp" if seat.ranks > 1 else "auto",
        precision="bf16-mixed" if workload.bfloat16 else "32-true",
        max_epochs=-1,
        default_root_dir=seat.directory,
        barebones=workload.sharded or seat.option == "barebones",
        callbacks=[TakeTurns(place)],
        use_distributed_sampler=seat.shuffle,  # its own shuffles in any case
    )
    dataset = workload.make_dataset()
    sampler: DistributedSampler[Any] | None = (
        None if seat.shuffle else DistributedSampler(dataset, seat.ranks, place.rank, shuffle=False)
    )
    loader = DataLoader(dataset, batch_size=workload.batch_size, shuffle=seat.shuffle, sampler=sampler)
    trainer.fit(Module(place, logs=seat.option == "log"), loader)


if __name__ == "__main__":
    main()
