"""A decoder-only transformer: sizes from a hundred thousand parameters to billions by config."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_recipes.errors import RequestError


class Attention(nn.Module):
    """Causal self-attention of several heads, [n, length, width] to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Tensor:
        n, length, width = input.shape
        query, key, value = (
            each.view(n, length, self.heads, width // self.heads).transpose(1, 2)
            for each in self.qkv(input).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).reshape(n, length, width)))


class Block(nn.Module):
    """Attention, then a perceptron of four times the width, each added to what it was given, normalised before."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        input = input + self.dropout(self.attention(self.attention_norm(input)))
        return input + cast(Tensor, self.dropout(self.mlp(self.mlp_norm(input))))


class Embedding(nn.Module):
    """What a token and its position stand for, [n, length] to [n, length, width]."""

    def __init__(self, vocab_size: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return cast(Tensor, self.dropout(self.token(tokens) + self.position(positions)))


class GPT(nn.Module):
    """Tokens ``[n, length]`` to the logits of the token that follows each, ``[n, length, vocab_size]``.

    As GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019): learnt positions, layer norm
    before each part, GELU, weights drawn with a deviation of 0.02, those that end in a sum over layers with less.

    Args:
        context: the most tokens that it looks at.
        tied: whether the last layer has the weights of the embedding, as Press & Wolf (2017) do.

    Raises:
        RequestError: a size is less than 1, or the heads do not divide the width.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "context": context, "heads": heads, "width": width}
        for name, size in sizes.items():
            if size < 1:
                raise RequestError(f"model.{name}={size} is too small: allowed is 1 and more.")
        if width % heads:
            raise RequestError(
                f"model.heads={heads} do not divide model.width={width}, which they share evenly. Use a width of "
                f"{width // heads * heads or heads} or {(width // heads + 1) * heads}, or other heads."
            )
        self.context = context
        self.embedding = Embedding(vocab_size, context, width, dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.token.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_in_sum = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends_in_sum else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.norm(self.blocks(self.embedding(tokens)))))
