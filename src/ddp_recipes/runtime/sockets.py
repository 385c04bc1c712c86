"""This process's TCP sockets, and the end of its connections to other ranks."""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress


def connections() -> set[int]:
    """Return the inodes of this process's TCP sockets."""
    return {os.fstat(each.fileno()).st_ino for each in sockets()}


def disconnect(inodes: set[int]) -> None:
    """End connections at once; closing would not, where a data worker, a fork, holds them as well."""
    for each in sockets():
        if os.fstat(each.fileno()).st_ino in inodes and not listens(each):
            with suppress(OSError):  # the other end has hung up
                each.shutdown(socket.SHUT_RDWR)


def sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, each as a copy that is open until the next one."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    yield copy


def listens(one: socket.socket) -> bool:
    """Whether a socket takes connections."""
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
