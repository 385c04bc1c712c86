"""The loop of PyTorch's tutorials: ``DataLoader``, ``DistributedSampler``, ``DistributedDataParallel``."""

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.competitors.place import Place
from benchmarks.samples import SEED


def main() -> None:
    """Train until the referee has seen enough."""
    place = Place.mine()
    place.join()
    seat, device, workload = place.seat, place.device, place.workload
    model = workload.make_model(device)
    device_ids = [place.rank] if device.type == "cuda" else None
    replica = DistributedDataParallel(model, device_ids) if seat.ranks > 1 else model
    dataset = workload.make_dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, seat.ranks, place.rank, shuffle=seat.shuffle, seed=SEED
    )
    loader = DataLoader(dataset, batch_size=workload.batch_size, sampler=sampler)
    optimizer = workload.make_optimizer(model)
    player = place.player(model)
    epoch, going = 0, player.begin()
    while going:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            with workload.forward(device):
                loss = workload.loss(replica(inputs), targets)
            loss.backward()
            optimizer.step()
            if not (going := player.step()):
                break
        epoch += 1
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
