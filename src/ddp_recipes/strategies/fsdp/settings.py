"""What ``strategy=fsdp`` means for the shape of a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ddp_recipes.config.keys import Count
from ddp_recipes.config.parallelism import Kind, ModelLayout
from ddp_recipes.errors import RequestError
from ddp_recipes.strategies.ddp_exact.settings import FixedShardsSettings

if TYPE_CHECKING:
    from ddp_recipes.config.request import Request


@dataclass(frozen=True, kw_only=True)
class FSDPSettings(FixedShardsSettings):
    """Replicas of the model, each held by several processes together.

    Attributes:
        replicas: how many; the model is dealt to the processes of each of them.
        wrap: ``auto``, the elements of the model's lists of blocks; or patterns of modules' names; or the least numbers
            that a module must have in parameters of no block inside it. What is in none is gathered as one more block.
        level: what is dealt to the ranks. 3: parameters, gradients and optimizer state; 2: parameters are whole from
            forward to backward; 1: through all passes of a step, and so are gradients unless ``shards`` gives an order.
        param_dtype: in which parameters are gathered, and the model computes; ``None``: their own. Rows stay what they
            are where they are updated, and gradients are reduced in float32.
        offload: whether a rank's rows, their gradients and optimizer state are on the CPU while a GPU runs the model.
    """

    name: ClassVar[str] = "fsdp"
    kind: ClassVar[Kind] = "sharded"
    deferred: ClassVar[bool] = True  # no process need have room for all of the model

    replicas: Count = 1
    wrap: Count | str | list[str] = "auto"
    level: Count = 3
    param_dtype: Literal["bfloat16", "float16"] | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        if self.level not in (1, 2, 3):
            raise RequestError(f"strategy.level={self.level} is not known. Allowed: 3, 2, 1.")

    def check_world_size(self, world_size: int) -> None:
        """Refuse a number of processes that does not fit, or that the replicas cannot share evenly."""
        super().check_world_size(world_size)
        each, left = divmod(world_size, self.replicas)
        if self.replicas > 1 and (left or each < 2):
            r = self.replicas
            raise RequestError(
                f"strategy.replicas={r} share the processes evenly, two or more each, and there are {world_size}. Use "
                f"{2 * r}, {3 * r}, {4 * r}, … processes (launcher.nproc_per_node), or strategy=ddp, whose processes "
                f"have a replica each."
            )

    def with_less_memory(self) -> list[dict[str, dict[str, Any]]]:
        """Return levels at which more is dealt, and rows on the CPU."""
        levels = {f"strategy.level={level}": {"level": level} for level in range(self.level + 1, 4)}
        return [levels, {"strategy.offload=true": {"offload": True}}]

    def layout(self, world_size: int) -> ModelLayout:
        """A process of each replica has the same rows; buffers are rank 0's after a step, or follow all shards."""
        return ModelLayout(self.kind, world_size // self.replicas, same_buffers=True)

    def check(self, request: "Request") -> None:
        """Refuse other ways to cut a model or a batch, and a loss that is scaled."""
        for key in ("num_devices", "micro_batches"):
            if (value := getattr(request.model, key)) > 1:
                raise RequestError(
                    f"model.{key}={value} does not go with strategy=fsdp, whose ranks hold the model together. Leave "
                    f"it out, or choose strategy=ddp."
                )
        if self.param_dtype is not None and request.run.check is not None and request.run.check_tolerance is None:
            raise RequestError(
                f"check={request.run.check} compares with strategy=single, whose parameters are not rounded to "
                f"strategy.param_dtype={self.param_dtype}. Say how much they may differ (check_tolerance=0.03), or "
                f"leave one of them out."
            )
        if self.param_dtype is not None and request.trainer.precision in ("bf16-true", "64-true"):
            raise RequestError(
                f"strategy.param_dtype={self.param_dtype} and trainer.precision={request.trainer.precision} both say "
                f"what the model computes in. Leave out one of them."
            )
        if request.trainer.channels_last:
            raise RequestError(
                "trainer.channels_last=true does not go with strategy=fsdp: torch deals parameters that lie in memory "
                "in the order of their dimensions. Leave it out, or choose strategy=ddp."
            )
        scaled = request.trainer.precision == "16-mixed"
        if self.param_dtype is not None and scaled != (self.param_dtype == "float16"):
            raise RequestError(
                f"strategy.param_dtype={self.param_dtype} does not go with trainer.precision="
                f"{request.trainer.precision}: gradients in float16 need the loss scaled, as 16-mixed alone does, and "
                f"autocast to float16 would round what is in bfloat16 again. Take bfloat16 with bf16-mixed or 32-true, "
                f"float16 with 16-mixed."
            )
