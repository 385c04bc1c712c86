"""The backward pass: the loop's short way to torch's engine does what ``Tensor.backward`` does."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph

from ddp_recipes.models import Toy
from ddp_recipes.runtime.fast_paths import backward


def gradients(run: Callable[[Tensor], None], passes: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    model = Toy()
    for _ in range(passes):
        run(nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_those_of_tensor_backward_bit_for_bit(passes: int) -> None:
    expected = gradients(Tensor.backward, passes)  # type: ignore[arg-type]
    found = gradients(backward, passes)
    assert len(found) == 4
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "loss",
    [
        lambda weight: weight * 2,
        lambda weight: (weight * 2j).sum(),
        lambda weight: weight.detach().sum(),
        lambda weight: weight.detach().sum().long(),
    ],
    ids=["a vector", "complex", "without a graph", "whole numbers"],
)
def test_a_loss_that_has_no_gradient_is_refused_in_torchs_words(loss: Callable[[Tensor], Tensor]) -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError) as expected:
        loss(weight).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError) as found:
        backward(loss(weight))
    assert str(found.value) == str(expected.value)


def test_a_second_pass_through_the_same_graph_is_refused() -> None:
    loss = torch.ones(3, requires_grad=True).square().sum()
    backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        backward(loss)


def test_a_kind_of_tensor_of_its_own_is_asked_first() -> None:
    called = []

    class Told(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    backward(torch.ones(3, requires_grad=True).sum().as_subclass(Told))
    assert Tensor.backward in called


def test_torchs_own_log_of_backward_passes_is_written(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph.log, "propagate", True)
    with caplog.at_level(logging.DEBUG, logger=graph.log.name):
        backward(torch.ones(3, requires_grad=True).square().sum())
    assert "PowBackward0" in caplog.text
