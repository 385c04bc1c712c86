"""``fully_shard`` by hand: each block, then the model, AdamW on what a rank has, whole batches by index."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.competitors.fast import epoch_order
from benchmarks.competitors.place import Place
from ddp_recipes.models import GPT

HALVES = 2  # of a batch, with the option ``accumulate``: gradients are exchanged after the last one


def main() -> None:
    """Train until the referee has seen enough."""
    place = Place.mine()
    place.join()
    seat, workload = place.seat, place.workload
    model = workload.make_model(place.device)
    sharded = shard(model)
    parts = HALVES if seat.option == "accumulate" else 1
    inputs, targets = (tensor.to(place.device) for tensor in workload.tensors())
    optimizer = workload.make_optimizer(model)
    player = place.player(model)
    epoch, going = 0, player.begin()
    while going:
        order = epoch_order(len(targets), epoch, seat.shuffle)[place.rank :: seat.ranks]
        for rows in torch.split(order, workload.batch_size):
            for part, of_part in enumerate(rows.chunk(parts), start=1):
                if parts > 1:
                    sharded.set_requires_gradient_sync(part == parts)
                with workload.forward(place.device):
                    outputs = model(inputs.index_select(0, of_part))
                    loss = workload.loss(outputs, targets.index_select(0, of_part))
                (loss / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not (going := player.step()):
                break
        epoch += 1
    dist.destroy_process_group()


def shard(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> FSDPModule:
    """Deal the parameters of a transformer to all ranks, or to those of ``mesh``."""
    assert isinstance(model, GPT)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    main()
