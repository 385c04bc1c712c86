"""Which weights are non-finite."""

import math

import pytest
import torch
from torch import Tensor, nn

from ddp_recipes.training.guards import non_finite_weights

HUGE = torch.finfo(torch.float32).max
CASES = {
    "numbers": (torch.tensor([1.0, -2.0]), False, False),
    "none": (torch.empty(0), False, False),
    "so large that their sum is infinite": (torch.full((4,), HUGE), False, False),
    "halves whose sum no half can be": (torch.full((9,), 60000.0, dtype=torch.float16), False, False),
    "bfloat16": (torch.full((9,), 3e38, dtype=torch.bfloat16), False, False),
    "integers": (torch.tensor([3, 4]), None, False),
    "a NaN": (torch.tensor([1.0, math.nan]), True, True),
    "an infinity": (torch.tensor([1.0, -math.inf]), True, False),
    "two infinities whose sum is NaN": (torch.tensor([math.inf, -math.inf]), True, False),
    "an infinity among halves": (torch.tensor([math.inf], dtype=torch.float16), True, False),
    "no data": (torch.empty(3, device="meta"), False, False),
}


@pytest.mark.parametrize(("values", "as_parameter", "as_buffer"), CASES.values(), ids=CASES)
def test_a_parameter_must_be_finite_and_a_buffer_not_nan(
    values: Tensor, as_parameter: bool | None, as_buffer: bool
) -> None:
    module = nn.Module()
    module.register_buffer("buffer", values)
    module.register_parameter("good", nn.Parameter(torch.ones(2)))
    expected = {"good": False, "buffer": as_buffer}
    if as_parameter is not None:  # integers cannot be
        module.register_parameter("parameter", nn.Parameter(values))
        expected["parameter"] = as_parameter
    assert non_finite_weights(module) == expected
