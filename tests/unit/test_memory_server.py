"""States in memory that other nodes read: whole, unaltered, and by whoever has the key alone."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from ddp_recipes.errors import RunFailed
from ddp_recipes.launchers.nodes.copies import Copies
from ddp_recipes.recovery.memory import SnapshotId, SnapshotSlots, new_file, path_of, snapshot_in, write_state
from ddp_recipes.recovery.memory_server import CHUNK, FIRST_S, REQUEST, MemoryClient, MemoryServer, opener
from ddp_recipes.recovery.state_transfer import load_snapshot, pieces_of
from ddp_recipes.runtime.tensors import OwnRows, whole_of
from helpers.processes import until

KEY, HOST = b"a key", "127.0.0.1"
ENDS_S = 20


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def filled(stack: ExitStack, content: bytes) -> int:
    file = new_file(stack)
    with open(path_of(file), "r+b") as opened:
        opened.write(content)
    return file


def served(stack: ExitStack, *files: int) -> MemoryServer:
    return stack.enter_context(MemoryServer(HOST, KEY, lambda: files))


def client_of(stack: ExitStack, port: int, key: bytes = KEY) -> MemoryClient:
    client = MemoryClient(HOST, port, key)
    stack.callback(client.close)
    return client


def read(client: MemoryClient, file: int, offset: int, length: int) -> bytes:
    content = bytearray(length)
    client.read(file, offset, memoryview(content))
    return bytes(content)


def test_a_file_is_read_from_anywhere_in_it(stack: ExitStack) -> None:
    content = os.urandom(2 * CHUNK + 1000)
    file = filled(stack, content)
    client = client_of(stack, served(stack, file).port)
    assert read(client, file, 0, len(content)) == content
    assert read(client, file, CHUNK - 5, 10) == content[CHUNK - 5 : CHUNK + 5]


def test_who_has_not_the_key_reads_nothing(stack: ExitStack) -> None:
    file = filled(stack, b"a secret state")
    port = served(stack, file).port
    with pytest.raises(ConnectionError):
        read(client_of(stack, port, b"another key"), file, 0, 8)
    with socket.create_connection((HOST, port), FIRST_S) as stranger:
        stranger.recv(16, socket.MSG_WAITALL)
        stranger.sendall(REQUEST.pack(bytes(16), file, 0, 8) + bytes(32))
        assert stranger.recv(100) == b""
    assert read(client_of(stack, port), file, 0, 8) == b"a secret"


def test_a_request_counts_on_its_own_connection_alone(stack: ExitStack) -> None:
    file = filled(stack, b"a secret state")
    port = served(stack, file).port
    sent: list[bytes] = []
    with relay(port, lambda from_client, data: sent.append(data) if from_client else None) as between:
        read(client_of(stack, between), file, 0, 8)
    with socket.create_connection((HOST, port), FIRST_S) as stranger:
        stranger.recv(16, socket.MSG_WAITALL)
        stranger.sendall(b"".join(sent))
        assert stranger.recv(100) == b""


@pytest.mark.parametrize(("offset", "length"), [(0, 99_999), (99_999, 1), (1 << 62, 1)])
def test_nothing_beyond_a_file_is_served(offset: int, length: int, stack: ExitStack) -> None:
    file = filled(stack, b"a state of 100 bytes".ljust(100))
    client = client_of(stack, served(stack, file).port)
    with pytest.raises(OSError, match="has not what it was asked for"):
        read(client, file, offset, length)
    assert read(client, file, 0, 7) == b"a state"


def test_no_other_file_of_the_process_is_served(stack: ExitStack) -> None:
    file, other = filled(stack, b"a state"), filled(stack, b"something else")
    with pytest.raises(OSError, match="has not what it was asked for"):
        read(client_of(stack, served(stack, file).port), other, 0, 4)


def test_altered_bytes_are_noticed(stack: ExitStack) -> None:
    file = filled(stack, b"a state")

    def alter(from_client: bool, data: bytes) -> bytes | None:
        return data.replace(b"state", b"stale") if not from_client else None

    with relay(served(stack, file).port, alter) as between, pytest.raises(RunFailed, match="altered on its way"):
        read(client_of(stack, between), file, 0, 7)


@contextmanager
def relay(port: int, through: Callable[[bool, bytes], bytes | None]) -> Iterator[int]:
    """Stand between a client and a server, once; yield the port."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server((HOST, 0)))
        listening.settimeout(ENDS_S)

        def pump(source: socket.socket, target: socket.socket, from_client: bool) -> None:
            try:
                while data := source.recv(1 << 16):
                    target.sendall(through(from_client, data) or data)
                target.shutdown(socket.SHUT_WR)
            except OSError:  # both have hung up
                pass

        def between() -> None:
            client, _ = listening.accept()
            server = socket.create_connection((HOST, port))
            with client, server:
                other = threading.Thread(target=pump, args=(server, client, False))
                other.start()
                pump(client, server, True)
                other.join(ENDS_S)

        thread = threading.Thread(target=between, daemon=True)
        thread.start()
        yield listening.getsockname()[1]


def keep(path: str, snapshot: SnapshotId, content: bytes) -> None:
    with open(path, "r+b") as file:
        write_state(file, snapshot, [content])


def test_the_newest_states_of_another_node_are_copied_as_they_come(stack: ExitStack) -> None:
    theirs, mine = SnapshotSlots.made(2, stack), SnapshotSlots.made(1, stack)
    other, own = Copies(theirs, HOST, KEY, stack), Copies(mine, HOST, KEY, stack)
    (first, second), (third, _) = theirs.paths
    keep(first, SnapshotId(5, 0, 3, "b"), b"x" * 2 * CHUNK)
    keep(mine.paths[0][0], SnapshotId(5, 2, 3, "b"), b"my own")
    with own.following(HOST, other.port, other.own, "b"):
        until(lambda: {held.snapshot.part for held in own.held()} == {0, 2}, ENDS_S, "nothing was copied")
        keep(second, SnapshotId(10, 0, 3, "b"), b"of one rank alone")
        keep(third, SnapshotId(10, 1, 3, "b"), b"of the other")
        new = {SnapshotId(10, 0, 3, "b"), SnapshotId(10, 1, 3, "b")}
        until(lambda: new <= {held.snapshot for held in own.held()}, ENDS_S, "the next step was not copied")
    contents = {held.snapshot: os.pread(held.file, 1 << 30, 0) for held in own.held()}
    assert contents[SnapshotId(5, 0, 3, "b")].endswith(b"x" * 2 * CHUNK)
    assert contents[SnapshotId(10, 0, 3, "b")].endswith(b"of one rank alone")
    assert contents[SnapshotId(10, 1, 3, "b")].endswith(b"of the other")
    keep(first, SnapshotId(15, 0, 3, "b"), b"later")
    assert {held.snapshot.step for held in own.held()} == {5, 10}


def test_what_this_node_has_itself_or_another_start_wrote_is_not_copied(stack: ExitStack) -> None:
    theirs, mine = SnapshotSlots.made(2, stack), SnapshotSlots.made(1, stack)
    other, own = Copies(theirs, HOST, KEY, stack), Copies(mine, HOST, KEY, stack)
    (first, second), (third, _) = theirs.paths
    keep(mine.paths[0][0], SnapshotId(5, 0, 2, "b"), b"a replica's rows")
    keep(second, SnapshotId(9, 0, 2, "a"), b"of another start")
    keep(first, SnapshotId(5, 0, 2, "b"), b"a replica's rows")
    keep(third, SnapshotId(5, 1, 2, "b"), b"other rows")
    with own.following(HOST, other.port, other.own, "b"):
        until(lambda: len(own.held()) == 2, ENDS_S, "nothing was copied")
    assert {held.snapshot for held in own.held()} == {SnapshotId(5, 0, 2, "b"), SnapshotId(5, 1, 2, "b")}


def test_a_copy_whose_source_is_lost_counts_as_nothing(stack: ExitStack) -> None:
    theirs, own = SnapshotSlots.made(1, stack), Copies(SnapshotSlots.made(1, stack), HOST, KEY, stack)
    ((path, _),) = theirs.paths
    keep(path, SnapshotId(5, 0, 2, "b"), b"x" * 3 * CHUNK)
    seen = 0

    def stop_halfway(from_client: bool, data: bytes) -> None:
        nonlocal seen
        seen += 0 if from_client else len(data)
        if seen > 2 * CHUNK:
            raise ConnectionError("the node is lost")

    other = Copies(theirs, HOST, KEY, stack)
    with relay(other.port, stop_halfway) as between, own.following(HOST, between, other.own, "b"):
        until(lambda: seen > 2 * CHUNK, ENDS_S, "nothing was copied")
    assert own.held() == ()


def test_a_source_that_gives_nothing_is_told_of_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddp_recipes.launchers.nodes.copies.WARN_S", 0.1)
    own, asked = Copies(SnapshotSlots.made(1, stack), HOST, KEY, stack), 0
    listening = stack.enter_context(socket.create_server((HOST, 0)))

    def hang_up() -> None:
        nonlocal asked
        while asked < 10:
            listening.accept()[0].close()
            asked += 1

    threading.Thread(target=hang_up, daemon=True).start()
    with own.following(HOST, listening.getsockname()[1], (1, 2), "b"):
        until(lambda: asked == 10, ENDS_S, "it is not asked again")
    assert capsys.readouterr().err.count("s no state in memory of node 127.0.0.1 has been copied") == 1


def test_a_server_that_is_closed_serves_no_more() -> None:
    before = threading.active_count()
    with MemoryServer(HOST, KEY, tuple):
        assert threading.active_count() == before + 1
    until(lambda: threading.active_count() == before, ENDS_S, "its thread goes on")


def test_rows_of_parts_are_read_by_any_number_of_ranks(stack: ExitStack) -> None:
    whole = torch.randn(10, 3)
    slots = SnapshotSlots.made(3, stack)
    copies = Copies(slots, HOST, KEY, stack)
    for part, (start, stop) in enumerate([(0, 4), (4, 8), (8, 10)]):
        state = {"weight": OwnRows(whole[start:stop], start, whole.shape), "count": torch.tensor(part), "drawn": [part]}
        with open(slots.paths[part][0], "r+b") as file:
            write_state(file, SnapshotId(5, part, 3, "b"), pieces_of(state, part))
    assert snapshot_in(slots.paths[2][0]) == SnapshotId(5, 2, 3, "b")
    elsewhere = f"{HOST}:{copies.port}/{copies.own[2]}"
    state = load_snapshot([slots.paths[0][0], elsewhere, slots.paths[2][0]], opener(KEY))
    assert torch.equal(whole_of(state["weight"]), whole)
    assert torch.equal(state["weight"].rows(3, 9), whole[3:9])
    assert (int(state["count"]), state["drawn"]) == (0, [0, 1, 2])
