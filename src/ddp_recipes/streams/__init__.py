"""Sets in shards, on disk or in a store, as map-style data sets whose order is computed: ``data=stream``.

Importing this package loads no library that reads shards.
"""

from typing import TYPE_CHECKING

from ddp_recipes._lazy import on_use

if TYPE_CHECKING:
    from ddp_recipes.streams.dataset import Stream as Stream
    from ddp_recipes.streams.mixture import Mixed as Mixed, Mixture as Mixture
    from ddp_recipes.streams.order import Windowed as Windowed
    from ddp_recipes.streams.packing import LengthBuckets as LengthBuckets, Packed as Packed

_HOMES = {
    ".dataset": ["Stream"],
    ".mixture": ["Mixed", "Mixture"],
    ".order": ["Windowed"],
    ".packing": ["LengthBuckets", "Packed"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__ = on_use(__name__, _HOMES)
