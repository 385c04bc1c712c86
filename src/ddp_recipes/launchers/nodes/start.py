"""A start of the ranks of several nodes: what each brings to it, and what they go on from. Loads no torch."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_recipes.launchers.nodes.copies import Held
from ddp_recipes.recovery.memory import SnapshotId, path_of
from ddp_recipes.recovery.source import Candidate, furthest

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ddp_recipes.launchers.nodes.heartbeat import Heartbeats


@dataclass(frozen=True)
class Offer:
    """What a node brings to a start of the ranks.

    Attributes:
        ranks: how many it can run.
        directory: the run directory.
        digest: of the config.
        name: that no other supervisor has.
        address: by which the others reach it.
        step, after: how far the state has come that it has in memory; -1 without one.
        state: the file of that, on that node.
        port: where it serves what it has in memory, ``own`` of its ranks, two files for each.
        held: states of parts of the model, also of other nodes' ranks.
        saved_step: of the newest checkpoint that it knows of.
        began: whether it has trained in this run.
        losses: of ranks and nodes in this run, until now: why, and at which :func:`moment`.
        reported: how many of those are reported to the user.
        former: names of the nodes of the start before that it does not know to be lost, and what to say if they are.
        left: the :func:`moment` at which it left that.
    """

    ranks: int
    directory: str
    digest: str
    name: str = ""
    address: str = ""
    step: int = -1
    after: int = 0
    state: str = ""
    port: int = 0
    own: tuple[int, ...] = ()
    held: tuple[Held, ...] = ()
    saved_step: int = -1
    began: bool = False
    losses: tuple[tuple[str, float], ...] = ()
    reported: int = 0
    former: tuple[tuple[str, str], ...] = ()
    left: float = 0.0

    @classmethod
    def of(cls, text: str) -> "Offer":
        """Return the one whose fields are in JSON."""
        values = json.loads(text)
        losses = tuple((str(why), float(since)) for why, since in values["losses"])
        former = tuple((name, why) for name, why in values["former"])
        held = tuple(Held(file, SnapshotId(*snapshot)) for file, snapshot in values["held"])
        return cls(**{**values, "losses": losses, "former": former, "own": tuple(values["own"]), "held": held})

    @property
    def progress(self) -> tuple[bool, int, int]:
        """How much the others want to go on from this."""
        return self.began, self.step, self.after


@dataclass(frozen=True)
class Start:
    """A start of the ranks on the nodes that have met.

    Attributes:
        name: that no other start of the run has.
        node: this one's place.
        offers: by node; the first has the state to go on with, if any has one.
        address, port: of the store in which ranks meet.
        store: which this process has, if it is the first node's.
        heartbeats: of the other nodes.
    """

    name: str
    node: int
    offers: Sequence[Offer]
    address: str
    port: int
    store: "TCPStore | None"
    heartbeats: "Heartbeats"
    endpoint: str

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """Losses of ranks and nodes until now, as far as any node knows."""
        every: dict[tuple[str, int], float] = {}
        for offer in self.offers:
            times = Counter[str]()
            for why, since in offer.losses:  # each node has noticed it at another time
                times[why] += 1
                every[why, times[why]] = min(since, every.get((why, times[why]), since))
        names, left = {offer.name for offer in self.offers}, max(offer.left for offer in self.offers)
        former = [{*offer.former} for offer in self.offers if offer.former]
        if former:  # a node that was lost while all left: nobody has noticed
            every |= {(why, 0): left for name, why in set.intersection(*former) if name not in names}
        return tuple(sorted(((why, since) for (why, _), since in every.items()), key=lambda loss: loss[1]))

    @property
    def nodes(self) -> tuple[tuple[str, str], ...]:
        """Names of the nodes, and what to say of each that is lost."""
        return tuple((offer.name, lost(node, offer.address)) for node, offer in enumerate(self.offers))

    @property
    def reported(self) -> int:
        """How many of those are reported to the user."""
        return max(offer.reported for offer in self.offers)

    @property
    def step(self) -> int:
        """The furthest of which any node has a state in memory, or knows a checkpoint."""
        return max(
            step
            for each in self.offers
            for step in (each.step, each.saved_step, *(snapshot.step for _, snapshot in each.held))
        )

    @property
    def states(self) -> tuple[str, ...]:
        """Where this node's ranks find the state to go on with, part by part; nowhere if it is not in memory."""
        if self.offers[0].step >= 0:
            return (self.offers[0].state,)
        nodes = sorted(enumerate(self.offers), key=lambda each: each[0] != self.node)  # what is here comes first
        newest = furthest(
            Candidate((snapshot.step, snapshot.start), snapshot.part, snapshot.parts, self._place(node, file))
            for node, offer in nodes
            for file, snapshot in offer.held
        )
        saved_step = max(offer.saved_step for offer in self.offers)
        return newest.places if newest is not None and newest.point[0] >= saved_step else ()

    def _place(self, node: int, file: int) -> str:
        """Return where this node's ranks find what a node has in memory."""
        offer = self.offers[node]
        return path_of(file) if node == self.node else f"{offer.address}:{offer.port}/{file}"

    def ranks_of(self, node: int) -> range:
        first = sum(offer.ranks for offer in self.offers[:node])
        return range(first, first + self.offers[node].ranks)


def lost(node: int, address: str) -> str:
    """Return what to say of a node that is lost."""
    return f"Node {node} ({address}) was lost."
