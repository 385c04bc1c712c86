"""Which parameters a pattern means: what is frozen, and the parameter groups of an optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ddp_recipes.errors import RequestError, nearest
from ddp_recipes.tasks import Task
from ddp_recipes.tasks.blocks import LISTS, matched
from ddp_recipes.tasks.task import outside

REST = "rest"  # the group of what no pattern matches


def freeze(model: nn.Module, patterns: str | Sequence[str]) -> None:
    """Have the matching parameters not be trained.

    Raises:
        RequestError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for name in matched(patterns, list(parameters), "model.freeze"):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RequestError(f"model.freeze={patterns} leaves no parameter of the model to train. Leave some out of it.")


def optimizer_of_groups(made: Callable[[list[dict[str, Any]]], Any], node: Mapping[str, Any], task: Task) -> Any:
    """Return the optimizer that is made of the task's parameters in the groups of the config's section.

    Raises:
        RequestError: as of :func:`grouped`, or a group sets what the optimizer does not have.
    """
    optimizer = made(grouped(node, task))
    check_options(optimizer.param_groups, optimizer.defaults)
    return optimizer


def grouped(node: Mapping[str, Any], task: Task) -> list[dict[str, Any]]:
    """Return the task's parameters in the groups of the config's section.

    Raises:
        RequestError: a group has no parameters, or one is in two groups.
    """
    groups, decay = node.get("groups") or {}, node.get("layer_decay")
    if not isinstance(groups, Mapping):
        raise RequestError(f"optimizer.groups={groups} is no section. Allowed: names, each with params and options.")
    parameters = {outside(name): parameter for name, parameter in task.named_parameters()}
    of: dict[str, str] = {}
    for group, options in groups.items():
        key = f"optimizer.groups.{group}"
        if group == REST or not isinstance(options, Mapping) or not options.get("params"):
            raise RequestError(
                f"{key}={options} is no group. Give params, a pattern or a list of them, and what differs, as in "
                f"'+optimizer.groups.head={{params: [fc], lr: 0.1}}'; {REST} is what no pattern matches."
            )
        for name in matched(options["params"], list(parameters), f"{key}.params"):
            if name in of:
                raise RequestError(
                    f"{name} is in two groups, optimizer.groups.{of[name]} and {key}. Make their patterns narrower."
                )
            of[name] = group
    layers = _layers(task.model) if decay is not None else []
    made: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        group = of.get(name, REST)
        options = {key: value for key, value in groups.get(group, {}).items() if key != "params"}
        if decay is not None:
            at = _layer_of(name, layers)
            options["lr"] = _lr(node, options) * _checked(decay) ** (len(layers) - 1 - at)
            group = f"layer_{at}" if not groups else f"{group}.layer_{at}"
        made.setdefault(group, {"params": [], "name": group, **options})["params"].append((name, parameter))
    return list(made.values())


def check_options(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Refuse what a group sets that the optimizer does not have, which torch would not look at.

    Raises:
        RequestError: names the nearest one that it has.
    """
    for group in groups:
        for name, value in group.items():
            key = f"optimizer.groups.{group.get('name')}.{name}"
            if name not in {*defaults, "params", "param_names", "name", "initial_lr"}:
                raise RequestError(
                    f"{key}: the optimizer has no {name} for a group. It has: {', '.join(sorted(defaults))}."
                    f"{nearest(name, defaults)}"
                )
            number = isinstance(defaults.get(name), (int, float)) and not isinstance(defaults.get(name), bool)
            if number and (not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0):
                raise RequestError(f"{key}={value} is not allowed. Allowed: a number at least 0.")


def _lr(node: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    lr = options.get("lr", node.get("lr"))
    if not isinstance(lr, (int, float)):
        raise RequestError("optimizer.layer_decay is a factor of optimizer.lr, which is not set: set it.")
    return float(lr)


def _checked(decay: object) -> float:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise RequestError(f"optimizer.layer_decay={decay} is not allowed. Allowed: a number above 0, up to 1.")
    return float(decay)


def _layers(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of a model's layers in their order, each with a dot at its end.

    An element of a Sequential or ModuleList is one layer, unless it is such a list itself; what holds such a list
    somewhere is looked into; any other child is one layer.
    """
    found = []
    for name, child in module.named_children():
        inner = f"{prefix}{name}."
        in_list = type(module) in LISTS
        if type(child) in LISTS or (not in_list and any(type(each) in LISTS for each in child.modules())):
            found += _layers(child, inner)
        elif next(child.parameters(), None) is not None:
            found.append(inner)
    return found


def _layer_of(name: str, layers: Sequence[str]) -> int:
    """Return the layer that a parameter is in: the first, if the model itself holds it; the last, if a loss does."""
    if name.startswith("task."):
        return len(layers) - 1
    return next((at for at, layer in enumerate(layers) if name.startswith(layer)), 0)
