"""Models made without memory: values, and random numbers after them, are those of the plain constructor."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ddp_recipes.build.deferred import Initial, without_memory
from ddp_recipes.build.init_recorder import SMALLEST
from ddp_recipes.models.gpt import GPT
from ddp_recipes.runtime.tensors import digest
from helpers.marks import quick_each


class Initialised(nn.Module):
    """Has what torch.nn.init offers, also what looks at what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(90, 80) for _ in range(9))
        self.layers.append(nn.Conv2d(70, 70, 3))
        a, b, c, d, e, f, g, h, i, conv = (each.weight for each in self.layers)
        nn.init.orthogonal_(a, 1.3)
        nn.init.trunc_normal_(b)
        nn.init.trunc_normal_(c, std=0.02)
        nn.init.trunc_normal_(d, a=0.5, b=0.7)
        nn.init.kaiming_normal_(e, mode="fan_out")
        nn.init.xavier_uniform_(f)
        nn.init.sparse_(g, 0.1)
        nn.init.eye_(h)
        nn.init.constant_(i, 0.3)
        nn.init.dirac_(conv)


class Shared(nn.Module):
    """Has tied, frozen, copied and padded parameters, buffers of all kinds, and tensors that are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 40, padding_idx=3)
        self.head = nn.Linear(40, 300, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(128, 128)).view(1, 1, 128, 128))
        self.register_buffer("kept", torch.full((100, 100), 2.0), persistent=False)
        self.hidden = torch.randn(10000).view(100, 100)
        self.listed = [torch.zeros(5000), (torch.arange(5000.0),)]
        self.low = nn.Linear(100, 100).half()
        self.copied = copy.deepcopy(self.low).requires_grad_(False)
        self.view = nn.Parameter(self.hidden[:60].t())
        self.apply(lambda each: nn.init.normal_(each.weight) if isinstance(each, nn.Embedding) else None)


class Changed(nn.Module):
    """Changes its parameters by operations of all kinds, looks at values, sets the default dtype, tries itself out."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.p = nn.Parameter(torch.randn(100, 100, generator=generator))
        self.q = nn.Parameter(nn.init.uniform_(torch.empty(100, 100), generator=generator))
        assert (self.p.device.type, self.p.is_meta) == ("cpu", False)
        self.largest = float(self.p.abs().max())
        with torch.no_grad():
            self.q[3:5] = 7.0
            self.q[self.q > 0.9] = 0
            self.q /= self.q.norm()
            self.q.data[:50].copy_(torch.from_numpy(np.random.rand(50, 100)))
        self.joined = nn.Parameter(torch.cat([self.p, self.q]).detach())
        self.permuted = nn.Parameter(self.p.detach()[torch.randperm(100)])
        self.dropped = nn.Parameter(F.dropout(self.p.detach(), 0.5))
        self.on = nn.Parameter(torch.zeros(100, 100, device=self.p.device) + torch.arange(100.0, device=self.p.device))
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        self.double_ = nn.Linear(100, 100)
        torch.set_default_dtype(default)
        self.normed = nn.utils.weight_norm(nn.Linear(100, 100))  # type: ignore[no-untyped-call]
        self.outputs = self.normed(torch.ones(2, 100)).detach()
        self.to("cpu")


def layers() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(16, 32, 5),
            nn.Embedding(500, 30),
            nn.LayerNorm(5000),
            nn.BatchNorm1d(5000),
            nn.Bilinear(20, 20, 20),
        ),
        *(nn.MultiheadAttention(64, 4), nn.LSTM(64, 64, 2), nn.GRU(64, 64), nn.Transformer(64, 2, 2, 2)),
    )


def parametrized() -> nn.Module:
    makers: tuple[Any, ...] = (
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    )
    return nn.Sequential(*(make(nn.Linear(100, 100)) for make in makers))


def timm(name: str) -> nn.Module:
    made: nn.Module = pytest.importorskip("timm").create_model(name)
    return made


def hugging_face(kind: str, config: str, **sizes: int) -> nn.Module:
    package = pytest.importorskip("transformers")
    made: nn.Module = getattr(package, kind)(getattr(package, config)(**sizes))
    return made


SMALL = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 200}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": layers,
    "initialised": Initialised,
    "shared": Shared,
    "changed": Changed,
    "parametrized": parametrized,
    "gpt": GPT,
    "timm vit": lambda: timm("vit_tiny_patch16_224"),
    "timm resnet": lambda: timm("resnet18"),
    "gpt2": lambda: hugging_face("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=2),
    "bert": lambda: hugging_face("BertForSequenceClassification", "BertConfig", **SMALL),
    "vit": lambda: hugging_face("ViTForImageClassification", "ViTConfig", **SMALL),
}


def seed() -> None:
    torch.manual_seed(3)
    random.seed(1)
    np.random.seed(1)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)


def drawn() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), np.random.rand()


@pytest.mark.filterwarnings("ignore")  # of these libraries
@pytest.mark.parametrize("name", quick_each(4, MODELS))
def test_values_are_those_of_the_plain_constructor(name: str) -> None:
    seed()
    plain, after = MODELS[name](), drawn()
    seed()
    model, initial, warned = without_memory(MODELS[name])
    assert (drawn(), warned) == (after, [])
    expected, found = tensors(plain), tensors(model)
    assert found.keys() == expected.keys()
    assert any(value.numel() >= SMALLEST for value in found.values())
    same: dict[int, int] = {}
    for key, value in found.items():
        assert value.is_meta == (key in initial)
        assert not value.is_meta or value.numel() >= SMALLEST
        assert same.setdefault(id(expected[key]), id(value)) == id(value), f"{key} is tied"
        assert (value.requires_grad, type(value)) == (expected[key].requires_grad, type(expected[key]))
        whole = initial[key].rows(0, len(value)) if key in initial else value
        torch.testing.assert_close(whole, expected[key], rtol=0, atol=0, equal_nan=True)
        if key in initial:
            assert (initial[key].shape, initial[key].dtype) == (value.shape, value.dtype)
            assert torch.equal(initial[key].rows(1, 3), whole[1:3])
    for key, own in vars(plain).items():
        if isinstance(own, Tensor):
            assert torch.equal(own, getattr(model, key))


def test_tensors_that_are_no_weights_have_their_memory() -> None:
    model, _, _ = without_memory(Shared)
    assert model.hidden.mean().abs() < 1
    assert [model.listed[0].sum(), model.listed[1][0][-1]] == [0, 4999]


class Looking(nn.Module):
    """Needs memory, in a way that no operation shows."""

    def __init__(self, catches: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(100, 100)
        try:
            self.layer.weight.data.numpy()[:] = 3
        except Exception:
            if not catches:
                raise


@pytest.mark.parametrize("catches", [True, False])
def test_what_needs_memory_is_made_whole_with_a_warning(catches: bool) -> None:
    seed()
    plain, after = Looking(catches), drawn()
    seed()
    model, initial, (warning,) = without_memory(lambda: Looking(catches))
    assert drawn() == after
    assert not initial
    assert "Each rank makes the whole model first" in warning
    assert "Tensor.numpy" in warning
    assert all(torch.equal(*both) for both in zip(plain.parameters(), model.parameters(), strict=True))


def test_an_error_of_a_constructor_is_the_plain_one() -> None:
    def wrong() -> nn.Module:
        nn.Linear(100, 100).weight.data.copy_(torch.zeros(3, 7))
        raise AssertionError

    with pytest.raises(RuntimeError, match="must match"), warnings.catch_warnings():
        without_memory(wrong)


@pytest.mark.slow
def test_origin_tells_initialisations_apart() -> None:
    def origins(number: int) -> str:
        torch.manual_seed(number)
        _, initial, _ = without_memory(GPT)
        return digest({name: each.origin() for name, each in initial.items()})

    assert origins(1) == origins(1) != origins(2)


@pytest.mark.slow
def test_one_whole_tensor_is_in_memory_at_a_time() -> None:
    _, initial, _ = without_memory(lambda: nn.Sequential(*(nn.Linear(100, 100) for _ in range(20))))
    recorder = next(iter(initial.values())).recorder
    assert not recorder.recent
    assert all(isinstance(each, Initial) and len(recorder.needed({each.ref.number})) == 1 for each in initial.values())
