"""ResNet-50 by hand, with a checkpoint of weights and optimizer at the first step of every other turn: ``torch.save``
in the loop, or on a thread with a copy of the state."""

import copy
import threading
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.competitors.place import Place

TURN = 20  # steps
EVERY = 2 * TURN


def main() -> None:
    """Train until the referee has seen enough."""
    place = Place.mine()
    workload, option = place.workload, place.seat.option
    model = workload.make_model(place.device)
    optimizer = workload.make_optimizer(model)
    loader = DataLoader(workload.make_dataset(), batch_size=workload.batch_size, shuffle=True)
    player = place.player(model)
    path = Path(place.seat.directory, "checkpoint.pt")
    step, going = 0, player.begin()
    while going:
        for inputs, targets in loader:
            if step and step % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if option == "thread":
                    threading.Thread(target=torch.save, args=[copy.deepcopy(state), path]).start()
                else:
                    torch.save(state, path)
            optimizer.zero_grad()
            workload.loss(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            if not (going := player.step()):
                break


if __name__ == "__main__":
    main()
