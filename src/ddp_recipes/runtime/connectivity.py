"""Whether the nodes of a run reach each other, before gloo tries, which waits for several timeouts and names nobody."""

import os
import selectors
import socket
import struct
import time
from contextlib import ExitStack, suppress
from fcntl import ioctl

from ddp_recipes.errors import RunFailed
from ddp_recipes.runtime.control import Control

MOST_S = 30.0  # for a connection, of which the system sends the first packet again and again
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def check_ways(control: Control) -> None:
    """Have the first rank of each node connect to those of the others. A collective.

    Raises:
        RunFailed: a node does not reach another one; the same on every rank, with all such pairs.
    """
    world = control.world
    if control.messages is None or world.nnodes == 1:
        return
    firsts = world.firsts
    with socket.socket() as door:
        if world.rank in firsts:
            door.bind((_address(), 0))
            door.listen(len(firsts))  # the system answers; nobody need accept
            control.tell("address", door.getsockname())
            others = {first: tuple(control.told("address", first)) for first in firsts if first != world.rank}
            failed = _unreachable(others, min(control.timeout_s, MOST_S))
            control.tell("ways", [f"rank {world.rank} ({door.getsockname()[0]}) {each}" for each in failed])
        failed = [each for first in firsts for each in control.told("ways", first)]
    if failed:
        raise RunFailed(
            f"Nodes do not reach each other: {'; '.join(failed)}. Open the ports between them in the firewall, or name "
            f"the network interface that they share: GLOO_SOCKET_IFNAME=eth0 in the environment of every rank."
        )


def _address() -> str:
    """Return the address that gloo listens on: that of the interface it is told, else of the host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with suppress(OSError):
        if not interface:
            return socket.gethostbyname(socket.gethostname())
        with socket.socket() as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(ioctl(any_socket.fileno(), _GET_ADDRESS, request)[20:24])
    return "127.0.0.1"  # as gloo does


def _unreachable(addresses: dict[int, tuple[str, int]], seconds: float) -> list[str]:
    """Connect to all at once; return what is wrong with each that does not answer."""
    failed = []
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for rank, address in addresses.items():
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(address)
            selector.register(connection, selectors.EVENT_WRITE, (rank, address, connection))
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                rank, (host, port), connection = key.data
                selector.unregister(connection)
                if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failed.append(f"cannot reach rank {rank} at {host}:{port} ({os.strerror(error)})")
        for key in selector.get_map().values():
            rank, (host, port), _ = key.data
            failed.append(f"cannot reach rank {rank} at {host}:{port} (no answer in {seconds:g} seconds)")
    return failed
