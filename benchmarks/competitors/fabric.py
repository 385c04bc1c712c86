"""Lightning Fabric: the tutorial's loop, its objects handed to ``Fabric``."""

import lightning
from torch.utils.data import DataLoader

from benchmarks.competitors.place import Place


def main() -> None:
    """Train until the referee has seen enough."""
    place = Place.mine()
    seat, workload = place.seat, place.workload
    fabric = lightning.Fabric(
        accelerator=seat.device,
        devices=seat.ranks,
        strategy="ddp" if seat.ranks > 1 else "auto",
        precision="bf16-mixed" if workload.bfloat16 else "32-true",
    )
    fabric.launch()
    model = workload.make_model(place.device)
    replica, optimizer = fabric.setup(model, workload.make_optimizer(model))
    dataset = workload.make_dataset()
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=workload.batch_size, shuffle=seat.shuffle))
    player = place.player(model)
    going = player.begin()
    while going:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = workload.loss(replica(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            if not (going := player.step()):
                break


if __name__ == "__main__":
    main()
