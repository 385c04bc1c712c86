"""Models of many kinds under every strategy and number of ranks: what is promised, or refused by name; and in time.

What is promised are bits, of ``ddp_exact`` and of ``fsdp`` with shards, else numbers close to those of one process.
"""

import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from differential import architectures

from ddp_recipes.checkpointing.reading import load
from ddp_recipes.errors import RequestError, RunFailed
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.runtime.tensors import put_together
from helpers.patience import patience
from helpers.ranks import run_recipe

SMALL = (
    *("data=random", "data.num_samples=41", "data.global_batch_size=12", "data.val_samples=21", "model=toy"),
    *("trainer.max_epochs=2", "trainer.log_every_n_steps=1", "trainer.progress=false", "logger=none"),
    *("launcher.device=cpu", "optimizer.lr=0.02"),
)
EXACT = ("strategy=ddp_exact", "strategy.shards=6")
DDP = ("strategy=ddp", "strategy.find_unused_parameters=true")
LONGEST_S = 90  # of a run: most take about one, the rest wait for a rank that has left the order
SEED = int(os.environ.get("DDP_RECIPES_TEST_SEED", "2"))  # the same every day; others by night, by hand


class Case(NamedTuple):
    """A strategy on some ranks."""

    overrides: tuple[str, ...]
    ranks: int

    @property
    def has_bits(self) -> bool:
        """Whether the bits of ``ddp_exact`` are promised."""
        return "strategy.shards=6" in self.overrides


def cases(name: str, choose: random.Random) -> list[Case]:
    """Return all cases of a model; some options of theirs are chosen at random."""
    wraps = architectures.wraps(name)
    found = [Case(each, ranks) for ranks in (1, 2, 3) for each in (DDP, EXACT)]
    for ranks in (1, 2, 3):
        for shards in (("strategy.shards=6",), ()):
            dealt = f"strategy.wrap={choose.choice(wraps)}", f"strategy.level={choose.choice((1, 2, 3))}"
            found.append(Case(("strategy=fsdp", *dealt, *shards), ranks))
    found += [Case((each, "model.num_devices=2", "model.split=auto"), 1) for each in ("strategy=single", EXACT[0])]
    return found + [Case(("strategy=ddp_pipeline", f"strategy.stages={ranks}"), ranks) for ranks in (2, 3)]


class Compared:
    """The runs of a model, each of which is what it should be, or refused by name."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.counts = name, folder, Counter[str]()
        self.kind = getattr(architectures, name)
        self.exact, self.single = self.run(Case(EXACT, 1)), self.run(Case(("strategy=single",), 1))
        assert not isinstance(self.single, str), self.single
        if not isinstance(self.exact, str) and not issubclass(self.kind, architectures.Mixed):
            self.close(self.exact, self.single)

    def run(self, case: Case) -> Summary | str:
        """Run a case; return what it was refused with, if it was."""
        self.counts["runs"] += 1
        model = f"model._target_=differential.architectures.{self.name}"
        directory = self.folder / f"{self.name}_{self.counts['runs']}"
        try:
            return run_recipe([*SMALL, model, *case.overrides], case.ranks, directory, timeout_s=patience(LONGEST_S))
        except (RequestError, RunFailed) as error:
            refused = str(error).strip().splitlines()[-1]
        assert not re.search(r"\b\w+(Error|Exception): ", refused), f"{self.name}, {case}: {refused}"
        return refused

    def check(self, case: Case) -> None:
        """Run a case, and see that it keeps its promise."""
        found = self.run(case)
        if isinstance(found, str):
            self.counts["refused"] += 1
            return
        if case.has_bits and not isinstance(self.exact, str):
            assert found["weights_sha256"] == self.exact["weights_sha256"], f"{self.name}, {case}: other bits"
            assert found["metrics"]["val/loss"] == self.exact["metrics"]["val/loss"], f"{self.name}, {case}"
        elif not issubclass(self.kind, architectures.Mixed):
            self.close(found, self.single)
        elif case.overrides[0] == "strategy=fsdp":
            self.close(found, self.run(Case(DDP, case.ranks)))  # as many replicas, which rank 0's buffers go to
        elif case.overrides == DDP and not [*self.kind(10, 8, 5).buffers()]:
            self.close(found, self.run(Case(("strategy=ddp_exact", f"strategy.shards={case.ranks}"), 1)))
        self.counts["same"] += 1

    def close(self, found: Summary, expected: Summary | str) -> None:
        """See that weights and losses are close."""
        assert not isinstance(expected, str), expected
        one, two = (weights(each) for each in (found, expected))
        assert one.keys() == two.keys()
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4, msg=lambda text: f"{self.name}, {found}: {text}")
        assert found["metrics"]["train/loss"] == pytest.approx(expected["metrics"]["train/loss"], rel=1e-3)
        assert found["metrics"]["val/loss"] == pytest.approx(expected["metrics"]["val/loss"], rel=1e-3)


def weights(summary: Summary) -> dict[str, torch.Tensor]:
    """Return what a run has learned."""
    model: dict[str, torch.Tensor] = put_together(load(Path(summary["last_checkpoint"]))["model"])
    return {name: value.float() if value.itemsize == 1 else value for name, value in model.items()}


@pytest.fixture(autouse=True)
def shown() -> None:
    """Show the seed with what fails."""
    print(f"DDP_RECIPES_TEST_SEED={SEED}")


@pytest.mark.slow
def test_a_sample_keeps_its_promises(tmp_path: Path) -> None:
    choose, counts = random.Random(SEED), Counter[str]()
    for name in choose.sample(architectures.names(), 4):
        compared = Compared(name, tmp_path)
        for case in choose.sample(cases(name, choose), 3):
            compared.check(case)
        counts += compared.counts
    print(dict(counts))
    assert counts["same"] + counts["refused"] == 12


@pytest.mark.nightly
@pytest.mark.parametrize("name", architectures.names())
def test_all_keep_their_promises(name: str, tmp_path: Path) -> None:
    choose = random.Random(f"{SEED} {name}")
    compared = Compared(name, tmp_path)
    for case in cases(name, choose):
        compared.check(case)
    print(dict(compared.counts))
    assert compared.counts["same"] >= 1  # the others are refused, or one of them has failed
