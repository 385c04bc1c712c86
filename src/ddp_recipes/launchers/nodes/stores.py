"""The store in which nodes meet: one node has it, or it is in a file that all share. Loads torch."""

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore

from ddp_recipes.errors import RequestError
from ddp_recipes.launchers.nodes.shared_file import TIMEOUT, SharedFile

FILE = "file://"
PORT = 29400  # torch's own for this
ELSEWHERE = "192.0.2.1"  # nobody has it (RFC 5737): what leads to other machines leads there


def normalized(endpoint: str) -> str:
    """Return ``host:port`` or ``file:///path``.

    Raises:
        RequestError: it is neither.
    """
    found = endpoint if ":" in endpoint else f"{endpoint}:{PORT}"
    if not (found.startswith(f"{FILE}/") or found.rpartition(":")[2].isdecimal()):
        raise RequestError(
            f"launcher.rdzv_endpoint={endpoint} is not allowed. Allowed: host:port of one of the nodes, or "
            f"file:///an/absolute/path that all nodes share."
        )
    return found


def own_address(endpoint: str) -> str:
    """Return the address of this machine on the way to the others; nothing is sent.

    Raises:
        RequestError: no way is known here.
    """
    host = ELSEWHERE if endpoint.startswith(FILE) else endpoint.rpartition(":")[0]
    family, address = _addresses(host)[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError as error:
        raise RequestError(
            f"launcher.rdzv_endpoint={endpoint}: this machine's address on the way there is not known ({error}). Set "
            f"launcher.local_addr to the one by which the other nodes reach it."
        ) from None


def open_store(endpoint: str, address: str, silent_s: float) -> Store:
    """Return the store: that of the node with the endpoint's address, which makes it, or the one in a file.

    Args:
        address: this machine's.
        silent_s: after so many seconds in which nobody writes, a file is of a run that has ended.

    Raises:
        RequestError: there is none.
    """
    if endpoint.startswith(FILE):
        try:
            return SharedFile(Path(endpoint.removeprefix(FILE)), silent_s)
        except (OSError, RuntimeError) as error:
            raise RequestError(
                f"launcher.rdzv_endpoint={endpoint}: {error}. Give a file on a file system that all nodes share and "
                f"where they can lock files, or host:port of one of the nodes."
            ) from error
    host, _, port = endpoint.rpartition(":")
    if address in {str(found[0]) for _, found in _addresses(host)}:
        with suppress(RuntimeError, ValueError):  # another process of this machine has it
            return TCPStore(host, int(port), is_master=True, multi_tenant=True, timeout=TIMEOUT)
    try:
        return TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RequestError(
            f"launcher.rdzv_endpoint={endpoint} does not answer: {error}. Give host:port of a node on which this is "
            f"started as well; that port must be free there and open to the others."
        ) from error


def _addresses(host: str) -> list[tuple[int, tuple[Any, ...]]]:
    """Return each address of a host as sockets take it, after its family."""
    try:
        found = socket.getaddrinfo(host, PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise RequestError(f"launcher.rdzv_endpoint: {host} has no address here: {error}.") from None
    return [(family, address) for family, _, _, _, address in found]
