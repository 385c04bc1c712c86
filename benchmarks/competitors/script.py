"""The toy of PyTorch's DDP tutorial as a script of its own: ``mp.spawn``, or the processes of torchrun, or just one.

It loads nothing but torch, so its start-up and memory are what any such script has.
"""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from benchmarks.player import Player, Seat


def main() -> None:
    """Start the ranks, or be one."""
    seat = Seat.mine()
    if seat.ranks == 1 or "RANK" in os.environ:
        work(int(os.environ.get("RANK", "0")), seat)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    spawn(work, (seat,), seat.ranks)  # type: ignore[no-untyped-call]


def work(rank: int, seat: Seat) -> None:
    """Train as one rank."""
    torch.manual_seed(42)
    model = replica = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    dataset = TensorDataset(torch.randn(2000 * seat.ranks, 10), torch.randn(2000 * seat.ranks, 5))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seat.ranks, rank)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    if seat.ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=seat.ranks)
        replica = DistributedDataParallel(model)  # type: ignore[assignment]
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    player = Player(seat, rank)
    epoch, going = 0, player.begin()
    while going:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(replica(inputs), targets).backward()
            optimizer.step()
            if not (going := player.step()):
                break
        epoch += 1
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
