"""The state of torch's rendezvous, which it pickles: taken from nobody without the key. Loads torch."""

import hmac
import os
from hashlib import blake2b

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

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
