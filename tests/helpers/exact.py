"""Recipes whose weights are the same bits on any number of ranks."""

import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed import PrefixStore, Store

from ddp_recipes import rank
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.job import Job
from ddp_recipes.runtime.messages import Messages
from ddp_recipes.runtime.world import World
from ddp_recipes.testing import on_ranks
from helpers.patience import patience

QUIET = [
    "data=random",
    "data.batch_size=2",
    "data.val_samples=21",
    "model=toy",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "trainer.progress=false",
    "logger=none",
    "checkpoint=none",
    "launcher.device=cpu",
]
RECIPES = {
    "dropout, momentum, clipping, fewer samples than shards at the end": [
        "data.num_samples=53",
        "model._target_=own_parts.Dropout",
        "trainer.gradient_clip_val=0.1",
    ],
    "adamw, bf16-mixed, accumulation, a last group of which most parts have nothing": [
        "data.num_samples=53",
        "optimizer=adamw",
        "trainer.precision=bf16-mixed",
        "trainer.accumulate_grad_batches=2",
    ],
    "batch norm, accumulation": [
        "data.num_samples=103",
        "data.batch_size=3",
        "model._target_=own_parts.Norm",
        "trainer.accumulate_grad_batches=2",
    ],
    "toy_mp, strided, 16-mixed, clipping": [
        "data.num_samples=61",
        "model=toy_mp",
        "data.shard=strided",
        "trainer.precision=16-mixed",
        "trainer.gradient_clip_val=0.1",
    ],
    "bf16-true, adamw, batch norm, clipping": [
        "data.num_samples=103",
        "data.batch_size=3",
        "optimizer=adamw",
        "model._target_=own_parts.Norm",
        "trainer.precision=bf16-true",
        "trainer.gradient_clip_val=0.1",
    ],
    "64-true, adamw, accumulation": [
        "data.num_samples=53",
        "optimizer=adamw",
        "trainer.precision=64-true",
        "trainer.accumulate_grad_batches=2",
    ],
    "layers that some parts, or none, use; weight decay": [
        "data.num_samples=61",
        "model._target_=exact_parts.Sometimes",
        "optimizer.weight_decay=0.1",
    ],
    "a layer that nothing uses, weight decay": [
        "data.num_samples=61",
        "model._target_=own_parts.Spare",
        "optimizer.weight_decay=0.1",
    ],
    "keeping buffers, accumulation, a last batch of which most shards have nothing": [
        "data.num_samples=77",
        "model._target_=exact_parts.Keeping",
        "trainer.accumulate_grad_batches=2",
    ],
    "buffers of all kinds, a parameter that is a number": ["data.num_samples=61", "model._target_=exact_parts.Keeping"],
    "numpy and random in the model and the collate function, validation too": [
        "data.num_samples=53",
        "model._target_=own_parts.Drawing",
        "data.collate_fn=own_parts.mixed",
        "data.train._target_=own_parts.OneByOne",
        "data.val._target_=own_parts.OneByOne",
        "data.num_workers=1",
    ],
    "random transform, workers, early stopping": [
        "data.num_samples=48",
        "data.train._target_=own_parts.OneByOne",
        "data.num_workers=1",
        "callbacks=early_stopping",
        "callbacks.early_stopping.patience=1",
        "optimizer.lr=0.4",
        "trainer.max_epochs=12",
    ],
}


def all_on_ranks(jobs: Mapping[str, Job], world_size: int) -> dict[str, Summary]:
    """Run jobs one after the other on the same forked ranks; return rank 0's summaries."""

    def run(world: World, store: Store | None) -> dict[str, Summary]:
        sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
        return {
            name: rank.run(job, world, None if store is None else Messages(PrefixStore(name, store), private=True))
            for name, job in jobs.items()
        }

    summaries: dict[str, Summary] = on_ranks(run, world_size, timeout_s=patience(400))[0]
    return summaries
