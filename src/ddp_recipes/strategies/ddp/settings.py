"""What ``strategy=ddp`` means for the shape of a run."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ddp_recipes.config.keys import Positive
from ddp_recipes.config.parallelism import ModelLayout, StrategySettings
from ddp_recipes.devices import HOST
from ddp_recipes.errors import RequestError

if TYPE_CHECKING:
    from ddp_recipes.config.request import Request


@dataclass(frozen=True, kw_only=True)
class DDPSettings(StrategySettings):
    """One process a replica; all but the first three keys are arguments of ``DistributedDataParallel``.

    Attributes:
        sync_batchnorm: batch-norm statistics over all ranks; GPU only, as torch's ``SyncBatchNorm`` is.
        shared_memory: whether ranks on the CPUs of one machine average gradients in memory that they share.
        comm_hook: what the all-reduce sends; ``None``: gradients as they are.
        broadcast_buffers: before each forward pass; ``None``: unless all buffers are those of batch norms. It is
            ``forward_sync_buffers`` in newer releases of torch, and both names are taken.
    """

    name: ClassVar[str] = "ddp"

    sync_batchnorm: bool = False
    shared_memory: bool = True
    comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    bucket_cap_mb: Positive | None = None
    bucket_cap_mb_list: list[int] | None = None
    find_unused_parameters: bool | None = None
    static_graph: bool | None = None
    gradient_as_bucket_view: bool | None = None
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    init_sync: bool | None = None
    check_reduction: bool | None = None
    skip_all_reduce_unused_params: bool | None = None
    batched_grad_copy: bool | None = None
    lazy_bucket_allocation: bool | None = None
    dim: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``DistributedDataParallel`` that are set."""
        own = {"processes", "sync_batchnorm", "shared_memory", "comm_hook"}
        names = [each.name for each in fields(DDPSettings) if each.name not in own]  # not those of a subclass
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def synchronises_batch_norm(self) -> bool:
        return self.sync_batchnorm

    @property
    def rounds_gradients(self) -> bool:
        return self.comm_hook in ("fp16", "bf16")

    def check(self, request: "Request") -> None:
        """Refuse micro-batches whose statistics would be exchanged, to compare gradients that are not, tiny buckets.

        torch compiles a model in parts, a bucket each, the first of which has 1 MB.
        """
        if request.trainer.compile and self.bucket_cap_mb is not None and self.bucket_cap_mb < 1:
            raise RequestError(
                f"strategy.bucket_cap_mb={self.bucket_cap_mb:g} does not go with trainer.compile="
                f"{str(request.trainer.compile).lower()}: there torch takes 1 or more. Leave out one of them."
            )
        if request.run.check is not None and self.comm_hook == "powersgd":
            raise RequestError(
                f"check={request.run.check} compares gradients, and strategy.comm_hook=powersgd exchanges "
                f"approximations in their place. Leave out one of them."
            )
        if request.model.micro_batches > 1 and self.sync_batchnorm:
            raise RequestError(
                f"model.micro_batches={request.model.micro_batches} and strategy.sync_batchnorm=true do not go "
                f"together: ranks may have different numbers of micro-batches, and would wait for each other's "
                f"statistics. Leave out one of them."
            )

    def layout(self, world_size: int) -> ModelLayout:
        """Every process has the whole model."""
        return ModelLayout()

    def batch_norm_remedy(self, device_type: str) -> str:
        """Return the key that has statistics taken from all ranks."""
        on_gpus = ", on GPUs," if device_type == HOST else ""
        return f"With strategy.sync_batchnorm=true{on_gpus} ddp takes them from all."

    def with_less_memory(self) -> list[dict[str, dict[str, Any]]]:
        """Return the strategy that deals the model to the ranks."""
        return [{"strategy=fsdp": {"_target_": "ddp_recipes.strategies.fsdp.FSDP"}}]

    def unused_parameters(self) -> str:
        """Return what torch makes of them, by its options."""
        if self.static_graph:
            return (
                "With strategy.static_graph=true torch takes those of the first step for unused for good: one that a "
                "later step uses is not learned from it. Take them out of the model, or freeze them "
                "(requires_grad=False)."
            )
        if self.find_unused_parameters:
            return ""
        return (
            "ddp will fail in the second step. Take them out of the model, freeze them (requires_grad=False), or use "
            "strategy.find_unused_parameters=true."
        )
