"""The task of a language model: which token follows."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_recipes._compat.torch_ import as_written
from ddp_recipes.datasets.windows import VOCABULARY, decode
from ddp_recipes.runtime.seeding import key
from ddp_recipes.tasks.task import Task


class LanguageModelingTask(Task):
    """Cross-entropy over the next token, in nats; ``perplexity`` is its exponential over a whole data set.

    A batch is (tokens, the tokens that follow), both int64, ``[n, length]``.

    Args:
        model: tokens ``[n, length]`` to logits ``[n, length, vocab_size]``; a ``context`` is the most that it looks at.
        metrics: as in :class:`Task`, of logits and following tokens.
        train_metrics: as in :class:`Task`.
        output: as in :class:`Task`.
        mean_over: as in :class:`Task`; targets of -100 do not count.
        new_tokens: how many tokens a prediction adds to each prompt.
        temperature: divides logits before a token is drawn; 0 takes the likeliest.
    """

    classes_last = True

    def __init__(
        self,
        model: nn.Module,
        metrics: Mapping[str, Any] | None = None,
        train_metrics: bool = False,
        output: str | int | None = None,
        mean_over: str = "auto",
        new_tokens: int = 256,
        temperature: float = 0.8,
    ) -> None:
        super().__init__(model, nn.CrossEntropyLoss(), metrics, train_metrics, output, mean_over)
        self.new_tokens, self.temperature = new_tokens, temperature

    @property
    def metric_names(self) -> list[str]:
        """Perplexity, too, which follows from the loss."""
        return [*super().metric_names, "perplexity"]

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs.flatten(0, -2), targets.flatten())  # type: ignore[no-any-return]

    def end_evaluation(self, split: str, metrics: dict[str, float]) -> dict[str, float]:
        """Add the perplexity of each data set."""
        losses = {name: value for name, value in metrics.items() if name.endswith("/loss")}
        return metrics | {f"{name.removesuffix('loss')}perplexity": math.exp(min(x, 700)) for name, x in losses.items()}

    def predict_step(self, batch: Any) -> Tensor:
        """Return the prompts with what the model adds to them, int64 [n, length + new_tokens].

        What is drawn for a sample follows from its number in the data set, so that ranks change nothing of it.
        """
        prompts = batch[0] if isinstance(batch, (tuple, list)) else batch
        seeds = [key(self.position.seed, number) for number in self.position.indices().tolist()]
        return self.generate(prompts, self.new_tokens, seeds)

    def in_words(self, predictions: Tensor) -> str | None:
        """Return a line of dashes and a text for each prediction, where tokens are bytes."""
        if int(predictions.max()) >= VOCABULARY:
            return None
        return "".join(f"{'-' * 80}\n{decode(tokens)}\n" for tokens in predictions)

    def generate(self, tokens: Tensor, count: int, seeds: Sequence[int] = ()) -> Tensor:
        """Return tokens ``[n, length]`` with ``count`` more, each drawn by what the model says of those before it.

        Args:
            seeds: of what is drawn for each of the first rows; torch's own generator for all if there are none.
        """
        context = getattr(self.model, "context", None) or tokens.shape[1] + count
        points = _points(seeds, len(tokens), count).to(tokens.device) if seeds else None
        for number in range(count):
            with as_written():  # else each length would be compiled
                logits = self.chosen(self.model(tokens[:, -context:]))[:, -1].float()
            if not self.temperature:
                following = logits.argmax(dim=1, keepdim=True)
            else:
                point = None if points is None else points[:, number, None]
                following = _drawn((logits / self.temperature).softmax(dim=1), point)
            tokens = torch.cat([tokens, following.to(tokens.device)], dim=1)
        return tokens


def _points(seeds: Sequence[int], rows: int, count: int) -> Tensor:
    """Return uniform numbers from 0 to 1 for each row from a seed of its own, float32 [rows, count]; 0 without one."""
    drawn = [torch.rand(count, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack([*drawn, *(torch.zeros(count) for _ in range(rows - len(drawn)))])


def _drawn(probabilities: Tensor, points: Tensor | None) -> Tensor:
    """Return what is drawn of ``probabilities`` [n, vocab_size], int64 [n, 1].

    Args:
        points: of each row where in the sum of its probabilities, [n, 1]; torch's own generator where there are none.
    """
    if points is None:
        return torch.multinomial(probabilities, 1)
    sums = probabilities.cumsum(dim=1)
    below = sums <= points.to(sums.device) * sums[:, -1:]
    return below.sum(dim=1, keepdim=True).clamp(max=probabilities.shape[1] - 1)
