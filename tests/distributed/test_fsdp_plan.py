"""``plan=true strategy=fsdp``: what it says of memory and of what is sent is what real ranks take."""

from pathlib import Path

import pytest

from benchmarks.dry_run import CASES, MODELS, QUIET, compared
from helpers.marks import slow_but


@pytest.mark.parametrize(("model", "size", "own"), slow_but(CASES[:1], CASES))
def test_ranks_take_and_send_what_a_dry_run_says(model: str, size: int, own: tuple[str, ...], tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("to be, or not to be, that is the question: " * 400)
    path = (f"data.path={text}",) if "gpt" in model else ()
    planned, real = compared((*QUIET, "strategy=fsdp", *MODELS[model], *path, *own), size)
    assert planned.training == pytest.approx(real.training, rel=0.1)
    assert planned.validation == pytest.approx(real.validation, rel=0.15)
    assert planned.given == pytest.approx(real.given, abs=500)
