"""The sockets on which gloo waits for the other ranks: open while they come in, and to nobody afterwards."""

import ctypes
import logging
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_recipes.runtime.process import listens, sockets

log = logging.getLogger(__name__)

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # a filter of one instruction, which lets no packet through
_ESTABLISHED = "01"


@contextmanager
def closed_after() -> Iterator[set[int]]:
    """Have ranks connect in this context; then let nobody else in, and disconnect other users, who are yielded.

    gloo listens for as long as a group lives, and takes whoever comes for a rank. All are connected when they leave
    here, so the system drops what comes later. Another user of this machine who was quicker than a rank thereby ends
    the run, by a connection that is closed, and takes no part in it.
    """
    unexpected = set[int]()
    before = {listener.getsockname() for listener in sockets() if listens(listener)}
    try:
        yield unexpected
    finally:  # also where ranks did not meet: an unexpected peer may be why
        unexpected |= _shut_since(before)


def _shut_since(before: Collection[object]) -> set[int]:
    """Let nobody else in where this process listens but did not before; disconnect other users, and return them."""
    ports, users = set(), set[int]()
    for listener in sockets():
        if listens(listener) and (name := listener.getsockname()) not in before:
            _drop_all(listener)
            ports.add(name[1])
    for connection in sockets():
        if connection.getsockname()[1] in ports and (user := _user_behind(connection)) not in (None, os.geteuid()):
            users.add(user)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
    for user in users:
        log.warning("User %d of this machine connected to this rank while ranks met, and was disconnected.", user)
    return users


def _drop_all(listener: socket.socket) -> None:
    """Drop what comes to a listening socket from now on; connections that were made stay."""
    code = ctypes.create_string_buffer(_DROP)
    with suppress(OSError):  # a system without filters
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))


def _user_behind(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection, if that is on this machine and open."""
    try:
        (here, port), (host, theirs) = connection.getsockname()[:2], connection.getpeername()[:2]
        if connection.family != socket.AF_INET or not host.startswith("127."):
            return None
    except OSError:  # it listens, or is closed
        return None
    ends = [
        f"{int.from_bytes(socket.inet_aton(name), sys.byteorder):08X}:{at:04X}"
        for name, at in ((host, theirs), (here, port))
    ]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:4] == [*ends, _ESTABLISHED]:
            return int(fields[7])
    return None
