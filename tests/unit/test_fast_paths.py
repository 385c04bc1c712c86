"""Shorter ways to what torch does: the same bits, steps, state and hooks, and less to load."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_recipes._compat.fast_paths import fused_step
from ddp_recipes.runtime.fast_paths import backward, enable, uncompiled, zero_grad
from ddp_recipes.testing import run_recipe
from helpers.patience import patience

OURS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "fused": True, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01}),
    (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
]


def trained(made: Callable[..., Optimizer], options: dict[str, Any], steps: int) -> tuple[nn.Module, Optimizer]:
    """Return a small model and its optimizer after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = made(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(3, 5)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        closure()
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)  # type: ignore[arg-type]
    return model, optimizer


@pytest.mark.parametrize(("kind", "options"), OURS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_steps_and_state_are_those_of_torch(kind: type[Optimizer], options: dict[str, Any]) -> None:
    (model, optimizer), (expected, torchs) = trained(uncompiled(kind), options, 4), trained(kind, options, 4)
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert its.requires_grad
    assert isinstance(optimizer, kind)
    assert str(optimizer) == str(torchs)
    mine, its = optimizer.state_dict(), torchs.state_dict()
    assert mine["param_groups"] == its["param_groups"]
    torch.testing.assert_close(mine["state"], its["state"], rtol=0, atol=0)
    again = trained(kind, options, 0)[1]
    again.load_state_dict(mine)
    trained(uncompiled(kind), options, 0)[1].load_state_dict(its)


FUSED: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
]


@pytest.mark.parametrize(("kind", "options"), FUSED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_fused_steps_are_those_of_the_kernel_once_there_is_a_state(
    kind: type[Optimizer], options: dict[str, Any]
) -> None:
    options = {"lr": 0.1, "fused": True, **options}
    for steps in (1, 3):
        (model, optimizer), (expected, torchs) = trained(kind, options, steps), trained(kind, options, steps)
        with torch.no_grad():
            assert fused_step(optimizer)
        torchs.step()
        assert [each.tolist() for each in model.parameters()] == [each.tolist() for each in expected.parameters()]
        torch.testing.assert_close(optimizer.state_dict(), torchs.state_dict(), rtol=0, atol=0)


UNLIKE: dict[str, tuple[bool, Callable[[Optimizer, nn.Parameter], object]]] = {
    "no gradient": (True, lambda optimizer, weight: None),
    "no state": (False, lambda optimizer, weight: setattr(weight, "grad", torch.ones(3))),
    "sparse": (False, lambda optimizer, weight: setattr(weight, "grad", torch.ones(3).to_sparse())),
    "scaled": (False, lambda optimizer, weight: setattr(optimizer, "found_inf", torch.zeros(1))),
    "not fused": (False, lambda optimizer, weight: optimizer.param_groups[0].update(fused=False)),
    "a rate that is a tensor": (False, lambda optimizer, weight: optimizer.param_groups[0].update(lr=torch.ones(()))),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_torch_takes_fused_steps_of_what_is_not_plain(case: str) -> None:
    expected, change = UNLIKE[case]
    model, optimizer = trained(torch.optim.AdamW, {"lr": 0.01, "fused": True}, 1)
    weight = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [weight]})
    change(optimizer, weight)
    before = [each.tolist() for each in model.parameters()]
    with torch.no_grad():
        assert fused_step(optimizer) == expected
    assert (before != [each.tolist() for each in model.parameters()]) == expected  # all groups, or none


def test_hooks_and_schedulers_are_called() -> None:
    model, optimizer = trained(uncompiled(torch.optim.SGD), {"lr": 0.1}, 0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # warns, which fails, unless it sees the step
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert calls == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_hooks_on_every_optimizer_are_called() -> None:
    optimizer = trained(uncompiled(torch.optim.SGD), {"lr": 0.1}, 1)[1]
    calls: list[Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda which, *_: calls.append(which))
    try:
        optimizer.step()
    finally:
        handle.remove()
    optimizer.step()
    assert calls == [optimizer]


def test_a_profiler_sees_the_step() -> None:
    optimizer = trained(uncompiled(torch.optim.SGD), {"lr": 0.1}, 1)[1]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_what_is_not_torchs_own_is_left_as_it_is() -> None:
    class Mine(torch.optim.SGD):
        pass

    def make(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters)

    assert uncompiled(Mine) is Mine
    assert uncompiled(make) is make
    assert uncompiled(torch.optim.SGD) is uncompiled(torch.optim.SGD)


@pytest.mark.slow
def test_the_compiler_is_not_loaded() -> None:
    lines = [
        "import sys, torch",
        "from ddp_recipes.runtime.fast_paths import uncompiled",
        "weight = torch.nn.Parameter(torch.ones(3))",
        "optimizer = uncompiled(torch.optim.AdamW)([weight])",
        "weight.sum().backward(); optimizer.step(); optimizer.load_state_dict(optimizer.state_dict())",
        "sys.exit('torch._dynamo' in sys.modules)",
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=patience(60)).returncode == 0


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda both: pickle.loads(pickle.dumps(both)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(("kind", "options"), OURS[:-1], ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_copied_optimizer_steps_the_same(
    kind: type[Optimizer], options: dict[str, Any], copied: Callable[[Any], Any]
) -> None:
    """Not LBFGS: torch's own keeps what it steps outside of what is pickled."""
    pair = trained(uncompiled(kind), options, 2)
    again = copied(pair)
    assert type(again[1]) is kind
    for model, optimizer in (pair, again):
        optimizer.zero_grad()
        model(torch.ones(3, 5)).square().sum().backward()
        optimizer.step()
    for mine, its in zip(pair[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(mine, its)
    torch.testing.assert_close(again[1].state_dict(), pair[1].state_dict(), rtol=0, atol=0)


@pytest.fixture
def off() -> Iterator[None]:
    """Turn the fast paths off for a test."""
    enable(False)
    yield
    enable(True)


@pytest.mark.usefixtures("off")
def test_what_is_off_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    tensor_backward, optimizer_zero_grad = torch.Tensor.backward, Optimizer.zero_grad

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (called.append(name), original(*arguments))[1]

    monkeypatch.setattr(torch.Tensor, "backward", counted("backward", tensor_backward))
    monkeypatch.setattr(Optimizer, "zero_grad", counted("zero_grad", optimizer_zero_grad))
    weight = nn.Parameter(torch.ones(3))
    optimizer = uncompiled(torch.optim.SGD)([weight])
    assert type(optimizer) is torch.optim.SGD
    backward(weight.sum())
    zero_grad(optimizer)
    assert called == ["backward", "zero_grad"]
    assert weight.grad is None


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="toy"),
        pytest.param(
            ["model=resnet18", "data=fake_images", "data.image_size=16", "data.num_samples=64"],
            id="images",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_ends_with_the_same_weights_without_them(overrides: list[str], tmp_path: Path) -> None:
    common = ["launcher.device=cpu", "trainer.max_steps=6", "logger=none", *overrides]
    ends = [
        run_recipe([*common, f"trainer.fast_paths={on}"], 2, tmp_path / on)["weights_sha256"]
        for on in ("true", "false")
    ]
    assert ends[0] == ends[1]
