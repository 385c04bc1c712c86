"""How the supervisors of nodes find each other, by torch's rendezvous, and know who is still there. Loads torch.

The store in which they meet is one node's, or in a file that all share. The state of the rendezvous, which torch
pickles there, is taken from nobody without the key.
"""

import hmac
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from ddp_recipes.errors import MAKE_KEY, RequestError, RunFailed
from ddp_recipes.launchers.environment import find_key
from ddp_recipes.launchers.nodes.heartbeat import Heartbeats
from ddp_recipes.launchers.nodes.shared_file import TIMEOUT, SharedFile
from ddp_recipes.launchers.nodes.start import Offer, Start
from ddp_recipes.runtime.messages import Messages

if TYPE_CHECKING:
    from ddp_recipes.launchers.nodes.launcher import NodesSettings


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


SIZE = 32


class SignedBackend(RendezvousBackend):
    """A backend whose state carries a digest, keyed over the run and the state.

    Args:
        run: a name that no other run has, nor an earlier one in the same store.
    """

    def __init__(self, backend: RendezvousBackend, key: bytes, run: bytes) -> None:
        self._backend, self._key, self._run = backend, key, run

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state, if there is one.

        Raises:
            RendezvousStateError: it was written without the key, or in another run.
        """
        found = self._backend.get_state()
        return None if found is None else (self._verified(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Set the state if it is still the one of the token; return what is there.

        Raises:
            RendezvousStateError: what is there was written without the key, or in another run.
        """
        found = self._backend.set_state(self._digest(state) + state, token)
        return None if found is None else (self._verified(found[0]), found[1], found[2])

    def _digest(self, state: bytes) -> bytes:
        return blake2b(self._run + b"\0" + state, key=self._key, digest_size=SIZE).digest()

    def _verified(self, signed: bytes) -> bytes:
        state = signed[SIZE:]
        if not hmac.compare_digest(signed[:SIZE], self._digest(state)):
            raise RendezvousStateError(
                "what is there was not written with this node's key for this run. Either nodes have different keys "
                "(DDP_RECIPES_KEY or ~/.ddp_recipes_key), or somebody else writes there"
            )
        return state


def signed_backend(store: Store, key: bytes, run: str) -> RendezvousBackend:
    """Return the backend of torch's ``c10d`` in a store, for the run that has begun there.

    The first of its nodes draws a name for it: the key alone does not tell its state from that of an earlier run.
    """
    drawn = store.compare_set(f"ddp_recipes/{run}/drawn", "", os.urandom(16).hex())
    return SignedBackend(C10dRendezvousBackend(store, run), key, run.encode() + b"\0" + drawn)


T = TypeVar("T")

LOOK_S = 0.1
SAY_S = 2.0  # before a person is told what is waited for
ATTEMPTS = 10  # in which some node does not say what it brings
CLOSE_S = 3.0


class _NoAnswer(Exception):
    """A node that has met the others does not say what it brings."""


class Rendezvous:
    """Where nodes meet.

    Args:
        signals: names of those that this process gets, also while it waits.

    Raises:
        KeyboardInterrupt: it got one.
        RequestError: they cannot meet there.
    """

    def __init__(self, settings: "NodesSettings", signals: Sequence[str]) -> None:
        self.key = find_key(os.environ)
        if not self.key:
            raise RequestError(f"launcher=nodes: others could write to this run as if they were its nodes. {MAKE_KEY}")
        self.endpoint, self.lost_after_s = normalized(str(settings.rdzv_endpoint)), settings.lost_after_s
        self.address, self._name = settings.local_addr or own_address(self.endpoint), settings.rdzv_id
        # Else a node that comes later gets no address, for which torch has all nodes wait: nobody uses it here.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        self._settings, self._signals, self._came = settings, signals, False
        self._store = self._answer(lambda: open_store(self.endpoint, self.address, silent_s=2 * self.lost_after_s))
        self.handler = self._answer(self._handler)

    def _handler(self) -> RendezvousHandler:
        settings, store = self._settings, self._store
        parameters = RendezvousParameters(
            "c10d",
            self.endpoint,
            settings.rdzv_id,
            settings.min_nodes,
            settings.nnodes,
            self.address,
            keep_alive_interval=1,
            keep_alive_max_attempt=max(1, round(settings.lost_after_s)),
            last_call_timeout=max(1, round(settings.more_after_s)),
        )
        return create_handler(store, signed_backend(store, self.key, settings.rdzv_id), parameters)

    def _answer(self, call: Callable[[], T]) -> T:
        """Call what asks the store, and return what it says, unless a signal comes before that."""
        found = _in_thread(call, lambda: bool(self._signals))
        if not found.done():
            raise KeyboardInterrupt
        try:
            return found.result()
        except RendezvousError as error:
            raise self._failed(error) from error

    def join(self, offer: Offer) -> Start:
        """Wait for the others, and agree on who brings what.

        Raises:
            KeyboardInterrupt: this process got a signal. Where ranks are to go on from what is in memory they start all
                the same, to save that, if the others come soon.
            RunFailed: the run has ended, or too few nodes have come.
        """
        self._come()
        stops = _Stops(self._signals, 2 * self.lost_after_s if offer.step >= 0 or offer.held else 0.0)
        for _ in range(ATTEMPTS):
            found = self._met(stops)
            with suppress(_NoAnswer):  # a node was lost as all met: without it they meet again
                return self._agreed(found, offer)
        raise RunFailed(f"Nodes that meet at {self.endpoint} do not answer, {ATTEMPTS} times in a row.")

    def _come(self) -> None:
        """Wait until all nodes of a run that has ended in the same file have exited: this is another run."""
        if self._came or not isinstance(self._store, SharedFile):
            return
        too_late = _after(4 * self.lost_after_s)
        while self._answer(self.handler.is_closed):
            if too_late():
                raise RunFailed(f"A run has ended in {self.endpoint}, but others write there. Give each its own file.")
            time.sleep(LOOK_S)
            self._answer(self._store.begin)
            self.handler = self._answer(self._handler)
        self._came = True

    def _met(self, stops: Callable[[], bool]) -> RendezvousInfo:
        """Wait until all are there."""
        quiet = _after(SAY_S)
        met = _in_thread(self.handler.next_rendezvous, lambda: stops() or quiet())
        if not (met.done() or stops()):
            print(f"Waiting at {self.endpoint} for the other nodes of this run.", file=sys.stderr, flush=True)
            _await(met, stops)
        if not met.done():
            raise KeyboardInterrupt
        try:
            return met.result()
        except RendezvousClosedError:
            raise RunFailed("Another node has ended the run.") from None
        except RendezvousError as error:
            raise self._failed(error) from error

    def _failed(self, error: RendezvousError) -> RunFailed:
        return RunFailed(f"The nodes of the run do not meet at {self.endpoint}: {error}")

    def _agreed(self, found: RendezvousInfo, offer: Offer) -> Start:
        """Return the start of nodes that have met, once each knows what the others bring."""
        own, nodes = found.rank, range(found.world_size)
        messages = self._of_this_round(found)
        messages.set(f"offer/{own}", json.dumps(asdict(replace(offer, address=self.address))))
        offers = [Offer.of(self._said(messages, f"offer/{node}")) for node in nodes]
        first = max(nodes, key=lambda node: (offers[node].progress, -node))
        if offer.digest != offers[first].digest:
            raise RequestError(
                f"This node's config is another one than that of {offers[first].address}, whose run it would join. "
                f"Start it with the same command: only launcher.nproc_per_node and launcher.local_addr may differ."
            )
        offers = [each if each.digest == offer.digest else replace(each, ranks=0, held=()) for each in offers]
        order = [first, *(node for node in nodes if node != first)]
        store: TCPStore | None = None
        if own == first:
            store = TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
            messages.set("port", str(store.port))
        port = int(self._said(messages, "port"))
        place = order.index(own)
        heartbeats = Heartbeats(messages, self._num_nodes_waiting, self.lost_after_s, place, len(order))
        ordered = [offers[node] for node in order]
        return Start(messages.name, place, ordered, ordered[0].address, port, store, heartbeats, self.endpoint)

    def _of_this_round(self, found: RendezvousInfo) -> Messages:
        """Return the messages of nodes that have met: none that were written in another round, or run, are of these.

        All names are under what each node has drawn for this round, so that each knows its own to be new.
        """
        messages = Messages(found.store, self.key, f"ddp_recipes/{self._name}")
        messages.set(f"drawn/{found.rank}", mine := os.urandom(16).hex())
        others = [node for node in range(found.world_size) if node != found.rank]
        drawn = {node: self._said(messages, f"drawn/{node}") for node in others} | {found.rank: mine}
        return messages.under(blake2b(json.dumps(sorted(drawn.items())).encode(), digest_size=8).hexdigest())

    def _num_nodes_waiting(self) -> int:
        try:
            return self.handler.num_nodes_waiting()
        except RendezvousError as error:
            raise RuntimeError(str(error)) from error

    def close(self) -> None:
        """End the run for all nodes, those that come later as well."""
        _in_thread(self.handler.set_closed, _after(CLOSE_S))

    def leave(self) -> None:
        """Have the others not wait for this node."""
        _in_thread(self.handler.shutdown, _after(CLOSE_S))

    def _said(self, messages: Messages, name: str) -> str:
        if (text := messages.get(name, self.lost_after_s)) is None:
            raise _NoAnswer
        return text


class _Stops:
    """Whether signals end a wait: at once, or after so many seconds; a second Ctrl-C always does at once."""

    def __init__(self, signals: Sequence[str], seconds: float) -> None:
        self._signals, self._seconds = signals, seconds
        self._over: Callable[[], bool] | None = None

    def __call__(self) -> bool:
        if self._signals and self._over is None:
            self._over = _after(self._seconds)
        return self._over is not None and (self._over() or self._signals.count("SIGINT") > 1)


def _in_thread(call: Callable[[], T], given_up: Callable[[], bool]) -> Future[T]:
    """Call what asks the store, which may not answer for ever; return the outcome, if there was one in time."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:  # noqa: BLE001 - the future raises it where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    _await(outcome, given_up)
    return outcome


def _await(outcome: Future[T], given_up: Callable[[], bool]) -> None:
    while not outcome.done() and not given_up():
        wait([outcome], LOOK_S)


def _after(seconds: float) -> Callable[[], bool]:
    deadline = time.monotonic() + seconds
    return lambda: time.monotonic() > deadline
