"""What a model's operations are counted as, and what devices are known to do."""

import pytest
import torch
from torch import Tensor, nn

from ddp_recipes.tasks import Task
from ddp_recipes.tools.flops import count_flops, known_peak


class Attention(nn.Module):
    """Causal attention of tokens ``[n, length, width]`` to themselves, and nothing else."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.query(tokens)
        return nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def test_products_are_counted_forward_and_backward() -> None:
    task = Task(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)), nn.MSELoss())
    batch = torch.ones(8, 10), torch.ones(8, 5)
    forward, inputs_of_the_second = 2 * (10 * 20 + 20 * 5), 2 * 20 * 5
    assert count_flops(task, batch) == 8 * (2 * forward + inputs_of_the_second)
    assert all(each.grad is None for each in task.parameters())


def test_attention_is_counted() -> None:
    n, length, width = 4, 6, 8
    batch = torch.ones(n, length, width), torch.ones(n, length, width)
    linear, scores = 2 * length * width * width, 2 * (2 * length * length * width)
    assert count_flops(Task(Attention(width), nn.MSELoss()), batch) == n * (2 * linear + 3 * scores)


@pytest.mark.parametrize(
    ("name", "precision", "products", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", "highest", 989e12),
        ("NVIDIA H100 PCIe", "16-mixed", "highest", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-true", "highest", 312e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", "highest", 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", "high", 156e12),
        ("NVIDIA A100-SXM4-80GB", "64-true", "highest", None),
        ("AMD Instinct MI300X", "32-true", "high", 163.4e12),
        ("NVIDIA L40", "bf16-mixed", "highest", None),
    ],
)
def test_peaks_go_by_name_and_precision(name: str, precision: str, products: str, peak: float | None) -> None:
    assert known_peak(name, precision, products) == peak
