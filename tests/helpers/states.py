"""Nested states to try properties on, and whether two of them are the same to the bit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from ddp_recipes._compat.torch_ import bytes_of
from ddp_recipes.checkpointing.parts import NAMES

TEXT = st.text("ab/[]0'é ", max_size=4)  # with what names in files are put together from
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
TURNS: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
    lambda tensor: tensor,
    lambda tensor: tensor.mT if tensor.dim() > 1 else tensor,
    lambda tensor: tensor[::2] if tensor.dim() else tensor,
    lambda tensor: tensor[..., 1:] if tensor.dim() else tensor,
    lambda tensor: tensor.expand(3, *tensor.shape),
)


@st.composite
def tensors(draw: st.DrawFn, most: int = 5) -> torch.Tensor:
    """Tensors of any dtype, shape and strides, of random bytes: NaNs of all kinds are among them."""
    dtype, shape = draw(st.sampled_from([*NAMES])), draw(st.lists(st.integers(0, most), max_size=3))
    size = torch.Size(shape).numel() * dtype.itemsize
    content = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    content = content % 2 if dtype == torch.bool else content
    return draw(st.sampled_from(TURNS))(content.to(torch.uint8).view(dtype).view(shape))


def nested(most: int = 5) -> st.SearchStrategy[Any]:
    """Tensors and plain data, in lists, tuples and dicts."""
    return st.recursive(
        PLAIN | tensors(most),
        lambda inside: (
            st.lists(inside, max_size=3)
            | st.lists(inside, max_size=3).map(tuple)
            | st.dictionaries(TEXT | st.integers(-1, 9), inside, max_size=3)
        ),
        max_leaves=8,
    )


def states(most: int = 5) -> st.SearchStrategy[dict[str, Any]]:
    """States as checkpoints hold them."""
    model = st.dictionaries(TEXT, tensors(most), max_size=4)
    return st.builds(
        lambda model, more: {**more, "model": model}, model, st.dictionaries(TEXT, nested(most), max_size=3)
    )


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are the same to the bit, of the same types and in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(bytes_of(one), bytes_of(other))
    if isinstance(one, dict):
        return same([*one.items()], [*other.items()])
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)  # NaN is NaN, and -0.0 is not 0.0
