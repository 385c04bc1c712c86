"""The nodes that a run is planned for, and what its rank 0 would have there."""

from dataclasses import dataclass

import torch

from ddp_recipes.build.devices import Devices, backend_of
from ddp_recipes.config.request import Request
from ddp_recipes.devices import GPU, HOST, NONE, Found, title, visible
from ddp_recipes.errors import RequestError
from ddp_recipes.runtime.world import World


@dataclass(frozen=True)
class Layout:
    """The nodes of a dry run, and its ranks: as many on each node, rank by rank.

    Attributes:
        gpus: of a node; there may be more than are used, and some with ``device_type=cpu``.
        world: as rank 0 sees it.
    """

    nnodes: int
    gpus: int
    device_type: str
    world: World


def devices(request: Request, layout: Layout | None = None) -> Devices:
    """Return the devices of rank 0 on such nodes: none of them has to be there, and a GPU has no name.

    Args:
        layout: what is planned for, seen from this machine, if left out.
    """
    layout = layout or cluster_of(request, visible(request.launcher.device))
    kind = layout.device_type
    own = [torch.device(HOST)] * request.num_devices
    return Devices(layout.world, own, kind, title(kind), backend_of(request, kind), layout)


def cluster_of(request: Request, found: Found) -> Layout:
    """Return what ``plan=true`` plans for, seen from a machine with these devices.

    Raises:
        RequestError: a run could not be there.
    """
    launcher, cluster = request.launcher, request.cluster
    gpus = found.count
    if cluster.gpus_per_node is not None:
        gpus = cluster.gpus_per_node
    elif (of_node := launcher.gpus_of_node()) is not None:
        gpus = of_node
    if launcher.device not in ("auto", HOST) and gpus == 0:
        raise RequestError(
            f"launcher.device={launcher.device}, but cluster.gpus_per_node=0"
            f"{'' if cluster.gpus_per_node == 0 else ', as on this machine'}. State the GPUs of a node "
            "(cluster.gpus_per_node=8, say), or use launcher.device=cpu."
        )
    found = Found(found.type if found.count else GPU, gpus) if gpus else NONE
    nnodes, k = cluster.nnodes or launcher.nnodes, request.strategy.processes_per_replica
    if launcher.nproc_per_node == "auto" and k > 1 and gpus and request.device_type(found) != HOST:
        # Replicas may span nodes: all GPUs are used, but for those that would be left over of a node with room.
        processes = gpus // request.num_devices
        if nnodes * processes % k and processes > k:
            processes -= processes % k
    else:
        processes = request.processes_on_node(found)
    world_size = 1 if request.strategy.max_world_size == 1 else nnodes * processes
    world = World(world_size=world_size, local_world_size=processes)
    return Layout(nnodes, gpus, request.device_type(found), world)
