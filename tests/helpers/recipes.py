"""Overrides of recipes that take a second or less."""

QUICK = (
    "data=random",
    "data.num_samples=64",
    "data.val_samples=21",
    "data.batch_size=8",
    "model=toy",
    "trainer.max_epochs=2",
    "trainer.progress=false",
    "logger=none",
    "launcher.device=cpu",
)

# What parts of many recipes import, which takes long.
OFTEN_USED = ("torch.distributed.pipelining", "torchmetrics", "torchvision")
