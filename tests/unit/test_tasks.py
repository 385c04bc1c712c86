"""A task: module, loss and metrics."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_recipes.errors import RequestError
from ddp_recipes.models import Toy
from ddp_recipes.runtime.tensors import digest
from ddp_recipes.tasks import Accuracy, MeanAbsoluteError, ModelLossTask, StepOutput, Task


class Weighted(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.scale * nn.functional.mse_loss(outputs, targets)


class Count:
    """Keeps state over batches, as torchmetrics' do."""

    def __init__(self) -> None:
        self.seen = 0

    def to(self, device: torch.device) -> "Count":
        return self

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += len(targets)

    def compute(self) -> int:
        return self.seen

    def reset(self) -> None:
        self.seen = 0


BATCH = (torch.randn(6, 10), torch.randn(6, 5))


def test_training_step_is_the_mean_loss() -> None:
    task = Task(Toy(), nn.MSELoss(), {"mae": MeanAbsoluteError()})
    output = task(BATCH)
    assert isinstance(output, StepOutput)
    assert torch.equal(output.loss, nn.functional.mse_loss(task.model(BATCH[0]), BATCH[1]))
    assert output.loss.requires_grad
    assert output.metrics == {}, "metrics are left to validation"
    assert output.weight == 6


def test_validation_step_measures_each_sample() -> None:
    count = Count()
    task = Task(Toy(), nn.MSELoss(), {"mae": MeanAbsoluteError(), "count": count})
    output = task.validation_step(BATCH)
    assert set(output.metrics) == {"mae"}
    assert output.metrics["mae"].shape == (6,)
    assert count.compute() == 6
    assert task.stateful_metrics == {"count": count}


def test_predict_step_ignores_targets() -> None:
    task = Task(Toy(), nn.MSELoss())
    expected = task.model(BATCH[0])
    for batch in (BATCH, list(BATCH), BATCH[0], (BATCH[0],)):
        assert torch.equal(task.predict_step(batch), expected)


class Named(Task):
    """Takes batches whose parts have names."""

    def training_step(self, batch: Any) -> StepOutput:
        return self.training_output(self.model(batch["inputs"]), batch["targets"])


def test_batches_that_only_steps_of_ones_own_know_take_a_predict_step() -> None:
    task = Named(Toy(), nn.MSELoss())
    with pytest.raises(AttributeError) as raised:  # of the model
        task.predict_step({"inputs": torch.ones(2, 10)})
    assert "Write predict_step(self, batch)" in raised.value.__notes__[0]


def test_accuracy_and_mean_absolute_error() -> None:
    outputs = torch.tensor([[1.0, 3.0, 2.0], [9.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    assert Accuracy()(outputs, torch.tensor([1, 2, 2])).tolist() == [1, 0, 1]
    values = torch.tensor([[1.0, -2.0], [0.0, 0.5]])
    assert MeanAbsoluteError()(values, torch.zeros(2, 2)).tolist() == [1.5, 0.25]
    assert MeanAbsoluteError()(torch.tensor([1.0, -2.0]), torch.zeros(2)).tolist() == [1, 2]


def test_accuracy_finds_the_dimension_of_the_classes() -> None:
    outputs, targets = torch.randn(4, 3, 5), torch.randint(3, (4, 5))
    expected = (outputs.argmax(dim=1) == targets).double().mean(dim=1)
    assert torch.equal(Accuracy()(outputs, targets), expected)
    assert torch.equal(Accuracy()(outputs.movedim(1, -1), targets), expected)
    alike, of_alike = torch.randn(4, 3, 3), torch.randint(3, (4, 3))
    second, last = Accuracy(), Accuracy()
    ModelLossTask(BringsItsLoss(), {"accuracy": last})  # as models of language have it
    assert torch.equal(second(alike, of_alike), last(alike.mT, of_alike))
    assert torch.equal(second(alike, of_alike), (alike.argmax(dim=1) == of_alike).double().mean(dim=1))
    for others in (torch.rand(4, 4), torch.zeros(4, 1, dtype=torch.int64)):
        with pytest.raises(RequestError, match=r"a class for each that the model finds. Its outputs are \[4, 4\] here"):
            Accuracy()(torch.randn(4, 4), others)


def test_mean_absolute_error_refuses_what_torch_would_broadcast() -> None:
    with pytest.raises(RequestError, match=r"the outputs are \[4, 1\] and the targets \[4\]. Give both one shape"):
        MeanAbsoluteError()(torch.randn(4, 1), torch.randn(4))


def test_weights_have_the_names_of_the_model() -> None:
    model = Toy()
    assert list(Task(model, nn.MSELoss()).weights()) == list(model.state_dict())
    assert digest(Task(model, nn.MSELoss()).weights()) == digest(dict(model.state_dict()))


def test_weights_hold_all_that_a_task_has() -> None:
    task = Task(Toy(), Weighted())
    assert "task.loss.scale" in task.weights()
    other = Task(Toy(), Weighted())
    with torch.no_grad():
        next(other.loss.parameters()).fill_(5)
    task.load_weights(other.weights())
    assert digest(task.weights()) == digest(other.weights())


def test_a_model_may_have_names_like_the_tasks_own() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(1, 1)
            self.loss = nn.Linear(1, 1)

    task, other = Task(Nested(), Weighted()), Task(Nested(), Weighted())
    assert set(task.weights()) == {"model.weight", "model.bias", "loss.weight", "loss.bias", "task.loss.scale"}
    task.load_weights(other.weights())
    assert digest(task.weights()) == digest(other.weights())


def test_missing_weights_are_an_error() -> None:
    task = Task(Toy(), nn.MSELoss())
    with pytest.raises(KeyError, match="net2"):
        task.load_weights({name: value for name, value in task.weights().items() if not name.startswith("net2")})


class BringsItsLoss(nn.Module):
    """Takes what it learns from by position, as models for tuples of a loader do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(10, 3)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_what_a_tuple_holds_is_called_as_the_model_calls_it() -> None:
    inputs, labels = torch.randn(4, 10), torch.tensor([0, 1, -100, 2])
    task = ModelLossTask(BringsItsLoss(), {"accuracy": Accuracy()}, mean_over="targets")
    by_name = {"inputs": inputs, "labels": labels}
    found, expected = task.validation_step((inputs, labels)), task.validation_step(by_name)
    assert torch.equal(found.metrics["accuracy"], expected.metrics["accuracy"])
    assert torch.equal(found.loss, expected.loss)
    assert task.amount([inputs, labels]) == task.amount(by_name) == found.amount == 3
    by_samples = ModelLossTask(task.model)
    assert by_samples.validation_step(by_name).amount is None
    assert by_samples.ignored(by_name)
    assert not task.ignored(by_name)


def test_a_tuple_without_what_is_asked_for_is_refused_with_the_names_it_has() -> None:
    task = ModelLossTask(BringsItsLoss(), {"accuracy": Accuracy()}, labels="targets")
    with pytest.raises(RequestError, match=r"task\.labels=targets is no tensor in a batch: inputs, labels"):
        task.validation_step((torch.randn(4, 10), torch.tensor([0, 1, 0, 2])))


class Pairs(BringsItsLoss):
    """Returns what it computes and the loss, as nanoGPT does."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        found = super().forward(inputs, labels)
        return found["logits"], found["loss"], None


def test_the_one_scalar_of_a_tuple_is_the_loss_and_an_output_has_a_place() -> None:
    batch = torch.randn(4, 10), torch.tensor([0, 1, 0, 2])
    task = ModelLossTask(Pairs(), {"accuracy": Accuracy()}, outputs=0)
    named = ModelLossTask(BringsItsLoss(), {"accuracy": Accuracy()})
    named.load_state_dict(task.state_dict())
    found, expected = task.validation_step(batch), named.validation_step(batch)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.metrics["accuracy"], expected.metrics["accuracy"])
    assert torch.equal(task.predict_step(batch), named.predict_step(batch))
    with pytest.raises(RequestError, match=r"task\.outputs=logits is no tensor in the output of Pairs: 0, 1, 2\. Set"):
        ModelLossTask(Pairs(), {"accuracy": Accuracy()}).validation_step(batch)
