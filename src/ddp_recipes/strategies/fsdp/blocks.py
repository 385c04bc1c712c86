"""The blocks whose parameters are gathered together, and parameters that cannot be dealt."""

from collections.abc import Sequence

from torch import nn

from ddp_recipes.errors import RequestError
from ddp_recipes.model_parallel.blocks import named, repeated
from ddp_recipes.tasks import Task


def blocks_of(model: nn.Module, wrap: str | Sequence[str]) -> list[str]:
    """Return the names of the modules that are gathered by themselves.

    Args:
        wrap: as ``strategy.wrap``.

    Raises:
        RequestError: there are none.
    """
    if wrap != "auto":
        return named(model, wrap, "strategy.wrap")
    if found := repeated(model):
        return found
    raise RequestError(
        f"strategy.wrap=auto takes the elements of nn.Sequential and nn.ModuleList, and {type(model).__name__} has "
        f"none with parameters. Name its blocks: strategy.wrap="
        f"[{','.join(name for name, each in model.named_children() if [*each.parameters()])}]."
    )


def refuse_parameters(task: Task, blocks: Sequence[str]) -> None:
    """Refuse parameters beside the model, of a single number, or of two blocks.

    Raises:
        RequestError: names them.
    """
    beside = [name for name, _ in task.named_parameters() if not name.startswith("model.")]
    if beside:
        raise RequestError(
            f"strategy=fsdp deals the parameters of the model, and the task has others beside it: "
            f"{', '.join(beside[:4])}. Put them into the model, or choose strategy=ddp."
        )
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in task.model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 0:
            raise RequestError(
                f"strategy=fsdp deals the rows of a parameter, and {name} is a single number. Make it of shape [1], or "
                f"choose strategy=ddp."
            )
        block = next((each for each in blocks if name.startswith(f"{each}.")), "the rest of the model")
        other, first = owners.setdefault(parameter, (block, name))
        if other != block:
            raise RequestError(
                f"{first} and {name} are one parameter, of two blocks ({other}, {block}) that strategy=fsdp gathers "
                f"one after the other. Choose strategy.wrap so that both are in one block, or in none."
            )
