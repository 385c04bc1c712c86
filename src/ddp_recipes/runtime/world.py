"""Who this process is among all processes of a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ddp_recipes.errors import RequestError

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """Rank and size, as torchrun defines them. One process is one rank and, in DDP, one replica.

    Attributes:
        firsts: the first rank of each node; where nothing is said, nodes are taken to hold equally many ranks.
        restarts: how often torchrun starts all ranks again at most.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    firsts: tuple[int, ...] = ()
    restarts: int = 0

    def __post_init__(self) -> None:
        if not self.firsts:
            object.__setattr__(self, "firsts", tuple(range(0, self.world_size, self.local_world_size)))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only rank that writes."""
        return self.rank == 0

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return len(self.firsts)

    @classmethod
    def of(cls, rank: int, size: int, local_rank: int, local_size: int) -> "World":
        """Return a rank's place among those that something started, on nodes that hold equally many.

        Raises:
            RequestError: ranks and sizes contradict each other.
        """
        if not (0 <= rank < size and 0 <= local_rank < local_size):
            raise RequestError(
                f"RANK={rank} with WORLD_SIZE={size}, LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_size}: "
                f"a rank counts from 0 to its size less one."
            )
        return cls(rank, size, local_rank, local_size, rank // local_size)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "World":
        """Read torchrun's variables.

        Raises:
            RequestError: some of them are missing, are not numbers, or contradict each other.
        """
        missing = [name for name in _REQUIRED if name not in environ]
        if missing:
            given = [name for name in _REQUIRED if name in environ]
            raise RequestError(
                f"The environment sets {', '.join(given)} but not {', '.join(missing)}. A rank needs all of "
                f"{', '.join(_REQUIRED)}: start with torchrun, set the others too, "
                f"or unset these to let ddp_recipes start its own processes (launcher=local)."
            )
        with whole_numbers("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            rank, size, local_rank = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
            world = cls.of(rank, size, local_rank, local_size)
            node_rank = int(environ.get("GROUP_RANK", world.node_rank))
            restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        return replace(world, node_rank=node_rank, restarts=restarts)


@contextmanager
def whole_numbers(*names: str) -> Iterator[None]:
    """Refuse environment variables of these names where one of them is no whole number."""
    try:
        yield
    except ValueError as error:
        raise RequestError(f"{', '.join(names)} must be whole numbers: {error}.") from None
