"""Lightning under torchrun, which starts all ranks again when one is lost; they go on from its last checkpoint."""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from benchmarks.competitors.lightning_ import KeepJournal, Module
from benchmarks.competitors.place import Place


def main() -> None:
    """Train from the last checkpoint on, if there is one."""
    torch.set_num_threads(1)
    place = Place.mine()
    seat, workload = place.seat, place.workload
    folder = Path(seat.directory) / "checkpoints"
    saved = ModelCheckpoint(dirpath=folder, every_n_train_steps=seat.save_every, save_last=True)
    trainer = lightning.Trainer(
        accelerator=seat.device,
        devices=seat.ranks,
        strategy="ddp",
        max_epochs=-1,
        max_steps=seat.max_steps,
        default_root_dir=seat.directory,
        logger=False,
        enable_progress_bar=False,
        callbacks=[KeepJournal(place), saved],
    )
    loader = DataLoader(workload.make_dataset(), batch_size=workload.batch_size, shuffle=seat.shuffle)
    trainer.fit(Module(place, logs=False), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
