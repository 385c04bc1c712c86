"""States in memory, read from another node by whoever has the run's key. Loads no torch.

Each side proves the key with each message: requests and answers carry a keyed digest over what both have chosen at
random, so that none is worth anything elsewhere. Nothing is encrypted, as no collective is.
"""

import hmac
import io
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import blake2b
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

from ddp_recipes.errors import RunFailed

CHUNK = 4 << 20  # bytes of an answer, at most
LENGTH = struct.Struct("<Q")
REQUEST = struct.Struct("<16sQQQ")  # random bytes, file, offset, length
SALT, DIGEST = 16, 32
FIRST_S = 5.0  # for the first request: who has no key holds no connection
IDLE_S = 60.0
ANSWER_S = 10.0
CONNECT_S = 3.0
CONNECTIONS = 256


def _digest(key: bytes, kind: bytes, *content: bytes | memoryview) -> bytes:
    made = blake2b(key=key, digest_size=DIGEST, person=kind)
    for each in content:
        made.update(each)
    return made.digest()


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        if not (count := connection.recv_into(into)):
            raise ConnectionError("the other side has closed the connection")
        into = into[count:]


def _received(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    _receive(connection, memoryview(content))
    return bytes(content)


class MemoryServer(ThreadingTCPServer):
    """Serves files of this process from threads, until it is closed.

    Args:
        address: of this node.
        files: returns the descriptors that may be read.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, key: bytes, files: Callable[[], Collection[int]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.key, self.files = key, files
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((address, 0), _Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    @property
    def port(self) -> int:
        """The port that the system chose."""
        return int(self.socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take no more connections than there are threads for."""
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def read(self, file: int, offset: int, length: int) -> bytes:
        """Return so many bytes of a file; none where they are not to be had."""
        there = file in self.files() and length <= CHUNK and offset + length <= os.fstat(file).st_size
        content = os.pread(file, length, offset) if there else b""
        return content if len(content) == length else b""  # else it is written meanwhile


class _Handler(BaseRequestHandler):
    server: MemoryServer
    request: socket.socket

    def handle(self) -> None:
        connection, server, salt = self.request, self.server, os.urandom(SALT)
        with suppress(OSError, OverflowError):  # whoever reads tells what became of it
            connection.settimeout(FIRST_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(salt)
            while True:
                request = _received(connection, REQUEST.size)
                digest = _received(connection, DIGEST)
                if not hmac.compare_digest(digest, _digest(server.key, b"request", salt, request)):
                    return
                _, *asked = REQUEST.unpack(request)
                content = server.read(*asked)
                digest = _digest(server.key, b"answer", salt, request, content)
                connection.sendall(b"".join((LENGTH.pack(len(content)), digest, content)))
                connection.settimeout(IDLE_S)


class MemoryClient:
    """Reads files of another node's process, over one connection, which it opens again where it has ended."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self.host, self.port, self._key = host, port, key
        self._connection: socket.socket | None = None
        self._salt, self._closed = b"", False

    def read(self, file: int, offset: int, into: memoryview) -> None:
        """Fill memory from a file.

        Raises:
            OSError: the node does not answer, or refuses.
            RunFailed: who answers has not the key, or somebody alters what is sent.
        """
        while into:
            self._read(file, offset, into[:CHUNK])
            offset, into = offset + len(into[:CHUNK]), into[CHUNK:]

    def _read(self, file: int, offset: int, into: memoryview) -> None:
        try:
            return self._exchange(file, offset, into)
        except RunFailed:
            self._disconnect()
            raise
        except OSError:
            if self._closed:
                raise
        self._disconnect()
        self._exchange(file, offset, into)

    def _exchange(self, file: int, offset: int, into: memoryview) -> None:
        connection = self._connection or self._connect()
        request = REQUEST.pack(os.urandom(SALT), file, offset, len(into))
        connection.sendall(request + _digest(self._key, b"request", self._salt, request))
        answer = _received(connection, LENGTH.size + DIGEST)
        (length,) = LENGTH.unpack(answer[: LENGTH.size])
        if length not in (0, len(into)):
            raise RunFailed(f"{self} sends what it was not asked for.")
        _receive(connection, content := into[:length])
        if not hmac.compare_digest(answer[LENGTH.size :], _digest(self._key, b"answer", self._salt, request, content)):
            raise RunFailed(f"What {self} sends was altered on its way, or was not written with this run's key.")
        if not length:
            raise FileNotFoundError(f"{self} has not what it was asked for")

    def _connect(self) -> socket.socket:
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        connection = self._connection = socket.socket(family, kind, protocol)
        if self._closed:
            raise ConnectionAbortedError(f"{self} is not asked any more")
        connection.settimeout(CONNECT_S)
        connection.connect(address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(ANSWER_S)
        self._salt = _received(connection, SALT)
        return connection

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def _disconnect(self) -> None:
        if (connection := self._connection) is not None:
            self._connection = None
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
            connection.close()

    def close(self) -> None:
        """End it, from any thread."""
        self._closed = True
        self._disconnect()

    def __del__(self) -> None:
        self._disconnect()  # whoever has a tensor of its files may read on, for as long


class RemoteFile(io.RawIOBase):
    """A file of another node's process."""

    def __init__(self, client: MemoryClient, file: int) -> None:
        self._client, self._file, self._at = client, file, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set where the next read begins, from the file's begin."""
        self._at = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer."""
        into = memoryview(buffer).cast("B")
        self._client.read(self._file, self._at, into)
        self._at += len(into)
        return len(into)


def opener(key: bytes) -> Callable[[str], io.RawIOBase]:
    """Return what opens a place: a path, or ``<host>:<port>/<descriptor>`` of another node's process."""
    clients: dict[str, MemoryClient] = {}

    def opened(place: str) -> io.RawIOBase:
        if place.startswith("/"):
            return io.FileIO(place)
        address, _, file = place.rpartition("/")
        host, _, port = address.rpartition(":")
        return RemoteFile(clients.setdefault(address, MemoryClient(host, int(port), key)), int(file))

    return opened
