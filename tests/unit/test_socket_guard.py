"""Listening sockets that were opened in between take nobody any more; nothing else is touched."""

import os
import socket
from pathlib import Path

from ddp_recipes.runtime.socket_guard import closed_after


def listening() -> socket.socket:
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    door.listen()
    return door


def comes_in(door: socket.socket) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(0.2)
        return stranger.connect_ex(door.getsockname()) == 0


def test_doors_of_the_meeting_close_and_others_stay_open(tmp_path: Path) -> None:
    with listening() as other, (tmp_path / "file").open("w"):
        with closed_after() as strangers:
            door = listening()
            assert comes_in(door)
        with door:
            assert comes_in(other)
            assert not comes_in(door)
        assert strangers == set()


def test_nothing_stays_open(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w"), socket.socket(socket.AF_UNIX):
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with closed_after():
                pass
        assert os.listdir("/proc/self/fd") == before
