"""Hugging Face Accelerate: the tutorial's loop, its objects handed to ``Accelerator.prepare``.

A model that all ranks hold together gets its plugin for FSDP2, which it leaves out where there is no GPU.
"""

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from benchmarks.competitors.place import Place


def main() -> None:
    """Train until the referee has seen enough."""
    place = Place.mine()
    seat, workload = place.seat, place.workload
    accelerator = Accelerator(
        cpu=seat.device == "cpu",
        mixed_precision="bf16" if workload.bfloat16 else "no",
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        if workload.sharded
        else None,
    )
    model = workload.make_model(place.device)
    dataset = workload.make_dataset()
    loader = DataLoader(dataset, batch_size=workload.batch_size, shuffle=seat.shuffle)
    replica, optimizer, loader = accelerator.prepare(model, workload.make_optimizer(model), loader)
    player = place.player(model)
    going = player.begin()
    while going:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = workload.loss(replica(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            if not (going := player.step()):
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
