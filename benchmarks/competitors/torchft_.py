"""torchft: each rank is a replica group of its own, and a supervisor starts again which of them ends.

It keeps to the defaults of torchft and of its example ``train_ddp.py``. Options: ``wait`` has the survivors wait for
the lost replica, where by default they go on without it; ``heartbeat`` takes a replica for dead after one second
without a heartbeat, not five.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from benchmarks.competitors.fast import epoch_order
from benchmarks.competitors.journal import Journal
from benchmarks.competitors.place import Place
from benchmarks.player import Seat
from benchmarks.samples import scaled

TIMEOUT = timedelta(seconds=30)
POLL_S = 0.02


def main() -> None:
    """Be a replica, or start them all."""
    if "RANK" in os.environ:
        train()
    else:
        supervise(Seat.mine())


def supervise(seat: Seat) -> None:
    """Keep a lighthouse, and a replica for each rank until it has finished."""
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=seat.ranks if "wait" in seat.option else 1,
        join_timeout_ms=10_000,  # as torchft's documentation starts it
        quorum_tick_ms=100,
        heartbeat_timeout_ms=1000 if "heartbeat" in seat.option else 5000,
    )
    # Replicas find their manager in a store of their group, which outlives them here, as an agent's of torchrun does.
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(seat.ranks)]
    common = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}

    def start(rank: int) -> subprocess.Popen[bytes]:
        environ = {**common, "RANK": "0", "REPLICA_GROUP_ID": str(rank), "MASTER_PORT": str(stores[rank].port)}
        return subprocess.Popen([sys.executable, "-m", "benchmarks.competitors.torchft_"], env=environ)

    replicas = {rank: start(rank) for rank in range(seat.ranks)}
    while replicas:
        for rank, replica in list(replicas.items()):
            status = replica.poll()
            if status == 0:
                del replicas[rank]
            elif status is not None:
                replicas[rank] = start(rank)
        time.sleep(POLL_S)


def train() -> None:
    """Train as one replica."""
    torch.set_num_threads(1)
    place, replica = Place.mine(), int(os.environ["REPLICA_GROUP_ID"])
    seat, workload = place.seat, place.workload
    bare = workload.make_model(place.device)
    inputs, targets = workload.tensors()

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    waits = "wait" in seat.option
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=seat.ranks if waits else 1,
        use_async_quorum=not waits,  # or who has come back takes no part in its first step
        init_sync=False,  # the weights follow from the seed
        replica_id=f"replica_{replica}",
        timeout=TIMEOUT,
    )
    model = DistributedDataParallel(manager, bare)
    optimizer = Optimizer(manager, workload.make_optimizer(bare))
    journal = Journal(seat, replica)
    of_step = workload.batch_size * seat.ranks
    steps_of_epoch = len(targets) // of_step
    order_of = cache(epoch_order)
    while manager.current_step() < seat.max_steps:
        optimizer.zero_grad()  # asks for the quorum; with "wait" it also takes a survivor's state, and its step
        epoch, step = divmod(manager.current_step(), steps_of_epoch)
        order = order_of(len(targets), epoch, seat.shuffle)
        rows = order[step * of_step : (step + 1) * of_step][replica :: seat.ranks]
        loss = workload.loss(model(scaled(inputs.index_select(0, rows))), targets.index_select(0, rows))
        loss.backward()
        before = manager.current_step()
        optimizer.step()  # unless an exchange has failed: then the batch is lost
        if manager.current_step() > before:
            journal.step(manager.current_step(), bare, manager.num_participants())
    sys.stdout.flush()
    os._exit(0)  # its threads would wait for those of replicas that have ended


if __name__ == "__main__":
    main()
