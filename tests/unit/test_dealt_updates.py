"""Where ``strategy.shards`` promises bits, an optimizer that is let through updates a slice as it updates the whole."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from ddp_recipes.errors import RequestError
from ddp_recipes.strategies.fsdp.blocks import refuse_optimizers

LENGTH, STEPS = 200, 6
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adam, decay": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
}


def updated(make: Make, weights: Tensor, gradients: list[Tensor], rows: slice) -> Tensor:
    """Return some rows after all steps, updated by themselves."""
    parameter = nn.Parameter(weights[rows].clone())
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient[rows].clone()
        optimizer.step()
    return parameter.detach()


def refusal(name: str, dtype: torch.dtype) -> str | None:
    """Return what is said against an optimizer of parameters of a type, if anything is."""
    try:
        refuse_optimizers([OPTIMIZERS[name]([nn.Parameter(torch.zeros(2, dtype=dtype))])], exact_on_cpu=True)
    except RequestError as error:
        return str(error)
    return None


def test_only_some_of_16_bits_are_refused_and_each_says_why() -> None:
    for dtype in (torch.float32, torch.float64):
        assert not any(refusal(name, dtype) for name in OPTIMIZERS)
    for dtype, let_through in ((torch.float16, set()), (torch.bfloat16, {"adam", "adamw", "amsgrad"})):
        said = {name: refusal(name, dtype) for name in OPTIMIZERS}
        assert {name for name in said if said[name] is None} == let_through
        assert all(f"In numbers of {dtype} the CPU computes the update of" in text for text in said.values() if text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_let_through_updates_rows_as_it_updates_all(name: str, dtype: torch.dtype) -> None:
    make = OPTIMIZERS[name]
    if refusal(name, dtype) is not None:
        pytest.skip("is refused")
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        weights = torch.randn(LENGTH, generator=generator).to(dtype)
        scales = 10 ** (-4 * torch.rand(STEPS, LENGTH, generator=generator))
        gradients = [*(torch.randn(STEPS, LENGTH, generator=generator) * scales).to(dtype)]
        whole = updated(make, weights, gradients, slice(LENGTH))
        for first, last in ((0, 7), (7, 29), (29, 62), (62, LENGTH), (13, 14)):
            rows = slice(first, last)
            assert torch.equal(updated(make, weights, gradients, rows), whole[rows]), (first, last)
