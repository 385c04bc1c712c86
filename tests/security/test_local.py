"""Another user of the machine, who attacks a plain local run."""

from functools import partial
from pathlib import Path
from signal import SIGTERM

import pytest

from helpers.attacks import as_user, flood, ports_of
from helpers.processes import ENDLESS, START_S, TWO, started, until, until_saved

pytestmark = [pytest.mark.spawn]


@pytest.mark.slow
def test_a_run_in_training_is_closed_to_strangers(stranger: int, folder: Path) -> None:
    with started(folder, *ENDLESS, TWO, "launcher.timeout_s=10") as run:
        until_saved(run, folder / "run")
        ranks = [run.rank(number) for number in (0, 1)]
        open_files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in ranks]
        ports = ports_of(ranks)
        assert ports, "no port is open: then this test shows nothing"
        flooded = folder / "flooded"
        with flooded.open("w") as opened, as_user(stranger, partial(flood, ports, ranks, opened)):
            until(flooded.read_text, START_S, "no flood")
            last = folder / "run" / "checkpoints" / "last.pt"
            before = last.stat().st_mtime_ns
            until(lambda: last.stat().st_mtime_ns > before, START_S, "it trains no more")
            assert flooded.read_text() == "end\n", "the stranger could open files of the ranks"
            assert [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in ranks] < [
                count + 20 for count in open_files
            ]
        run.signal(SIGTERM)
        assert run.end().status == 75
