"""What torch's FSDP2 takes for a reduce-scatter of one's own."""

from typing import Any

# ``FSDPModule.set_custom_reduce_scatter`` takes one of this class, which no public module has.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as _ReduceScatter

ReduceScatter: Any = _ReduceScatter
