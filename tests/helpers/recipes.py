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

# Batches of a user's own kind: ``data_parts.of_kind``.
OF_KIND = (
    "~data.train",
    "~data.val",
    "+data.train={_target_: data_parts.Ragged}",
    "+data.val={_target_: data_parts.Ragged, size: 12}",
    "task=classification",
    "task._target_=data_parts.OfKind",
    "data.collate_fn={_target_: data_parts.of_kind, _partial_: true, kind: list}",
    "data.global_batch_size=8",
)
