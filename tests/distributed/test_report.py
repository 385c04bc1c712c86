"""``ddp-recipes report``: a page that needs nothing else, and says what the files of a run or a sweep say."""

import json
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ddp_recipes.errors import RequestError
from ddp_recipes.reporting.run_directory import Summary
from ddp_recipes.tools.report import report
from ddp_recipes.tools.report.page import FACTS, MACHINE
from ddp_recipes.tools.report.records import read_curves, thinned
from helpers.patience import patience
from helpers.recipes import QUICK

Run = Callable[..., Summary]

VOID = {"meta", "input", "img", "br"}
ERROR = "<script>alert('&')</script> </script> of a user's"
LOGGED = ["logger=csv", "trainer.log_every_n_steps=1"]


class Page(HTMLParser):
    """A page whose tags are closed in their order: its tables, its numbers, and the data of its script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.numbers: list[float] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.ids: list[str] = []
        self.data: Any = None
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [found[name] or "" for name in ("src", "href", "action") if name in found]
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag == "data":
            self.numbers.append(float(found["value"] or "nan"))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.data = self.data or json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        elif self.open[-1:] != ["style"]:
            self.texts.append(data)
            if {"td", "th"} & {*self.open}:
                self.rows[-1][-1] += data.strip()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page_of(directory: Path) -> Page:
    """Return the page of a run or a sweep, once it is sure that it asks for nothing else."""
    with redirect_stdout(StringIO()) as printed:
        report([str(directory)])
    assert printed.getvalue() == f"{directory / 'report.html'}\n"
    text = (directory / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert all(address.startswith("data:") for address in page.addresses)
    code = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(|XMLHttpRequest|import\(", code)
    assert "default-src 'none'" in text
    return page


def lines(page: Page) -> dict[str, tuple[list[int], list[float | None]]]:
    """Return the curves in the page of a run, by metric."""
    charts = [chart for group in page.data["charts"].values() for chart in group]
    return {line["name"]: (line["steps"], line["values"]) for chart in charts for line in chart["lines"]}


def test_the_page_of_a_run_has_the_numbers_of_its_files(run: Run, tmp_path: Path) -> None:
    summary = run(*LOGGED, world_size=2)
    directory = Path(summary["run_directory"])
    page = page_of(directory)

    shown = {"global_step", "epoch", "samples_per_second", "step_time_ms", "wall_time_s", "ranks_replaced"}
    assert {summary[name] for name in shown} | {*summary["metrics"].values()} <= {*page.numbers}
    assert summary["weights_sha256"] in page.text
    assert "Files that are missing" not in page.text
    rows = (directory / "csv" / "metrics.csv").read_text().splitlines()
    columns, cells = rows[0].split(","), [row.split(",") for row in rows[1:]]
    found = lines(page)
    assert {*found} == {*columns} - {"step", "train/epoch"}
    for name, (steps, values) in found.items():
        at = columns.index(name)
        assert [(int(row[0]), float(row[at])) for row in cells if row[at]] == list(zip(steps, values, strict=True))


@pytest.mark.slow
def test_a_run_with_event_files_alone_goes_on_where_it_was_resumed(run: Run, tmp_path: Path) -> None:
    """What an earlier start logged after its checkpoint is hidden, as TensorBoard hides it."""
    directory = tmp_path / "resumed"
    often = ["logger=tensorboard", "trainer.log_every_n_steps=1", "checkpoint.every_n_steps=3"]
    first = run(*often, "trainer.max_steps=5", directory=directory)
    (directory / "checkpoints" / "last.pt").unlink()
    (directory / "checkpoints" / "step_00000005.pt").unlink(missing_ok=True)
    summary = run(*often, "trainer.max_steps=9", "ckpt_path=auto", directory=directory)
    assert (first["global_step"], summary["global_step"]) == (5, 9)

    page = page_of(directory)
    steps, values = lines(page)["train/loss"]
    assert steps == list(range(1, 10))
    assert values[-1] == pytest.approx(summary["metrics"]["train/loss"], rel=1e-6)  # an event file has 32 bits
    assert ["starts", "2"] in page.rows


@pytest.mark.slow
@pytest.mark.spawn
def test_the_page_of_a_sweep_has_all_its_jobs_and_what_failed(python: str, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "import torch\n\n\n"
        "class Part(torch.nn.Linear):\n"
        "    def __init__(self, lr=0.0, text='', **features):\n"
        "        super().__init__(10, 5)\n"
        "        self.fails = text if lr == 0.5 else None\n\n"
        "    def forward(self, batch):\n"
        "        if self.fails is not None and self.training:\n"
        f"            raise ValueError({ERROR!r})\n"
        "        return super().forward(batch)\n"
    )
    own = ["model._target_=parts.Part", "+model.lr=${optimizer.lr}", "launcher.nproc_per_node=1"]
    varied = ["optimizer.lr=0.1,0.5", "+model.text='<i>a</i>','b c'"]
    command = [python, "-m", "ddp_recipes", "-m", *QUICK, *LOGGED, *own, *varied]
    done = subprocess.run(
        [*command, f"hydra.sweep.dir={tmp_path / 'sweep'}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )
    assert done.returncode == 1, done.stderr
    page = page_of(tmp_path / "sweep")

    jobs = [json.loads((tmp_path / "sweep" / str(n) / "summary.json").read_text()) for n in range(4)]
    assert [job["status"] for job in jobs] == ["finished", "finished", "failed", "failed"]
    (head, *rows) = page.rows
    assert head[:4] == ["run", "optimizer.lr", "model.text", "status"]
    assert [row[:4] for row in rows] == [
        [str(n), lr, text, job["status"]]
        for n, (job, lr, text) in enumerate(
            zip(jobs, ["0.1", "0.1", "0.5", "0.5"], ["'<i>a</i>'", "'b c'"] * 2, strict=True)
        )
    ]
    assert {job["objective"] for job in jobs[:2]} <= {*page.numbers}
    assert [job["objective"] for job in page.data["sweep"]["jobs"]] == [job["objective"] for job in jobs]
    assert f"rank 0: ValueError: {ERROR}" in page.text
    best = min(range(2), key=lambda n: jobs[n]["objective"])
    assert f"by run {best}" in page.text

    failed = page_of(tmp_path / "sweep" / "2")
    assert f"ValueError: {ERROR}" in failed.text
    assert "Traceback (most recent call last)" in failed.text
    assert "model.text='<i>a</i>'" in failed.text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("summary.json", b'{"status": ', "summary.json is damaged"),
        ("summary.json", None, "summary.json is missing"),
        ("config.yaml", None, "config.yaml is missing"),
        ("config.yaml", b"seed: \xff\xfe 3\nmodel:\n  a: 1\n", "config.yaml is damaged: not all of it is text"),
        ("csv/metrics.csv", b"step,val/loss\n1,0.5\n2,zero\n3,0.1,7\n4", "3 rows are not numeric, or not whole"),
        ("csv/metrics.csv", b"\xff\x00", "csv/metrics.csv cannot be read"),
        ("csv/metrics.csv", b"", "does not begin with a row of names"),
        ("tensorboard/events.out.tfevents.1", b"\x00" * 40, "can be read up to byte 0 of 40"),
        ("profile.png", b"no picture", "profile.png is not shown: it is no PNG"),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    name: str, content: bytes | None, says: str, recorded: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(recorded, directory)
    if name.startswith("tensorboard"):
        shutil.rmtree(directory / "csv")
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).unlink(missing_ok=True)
    if content is not None:
        (directory / name).write_bytes(content)
    page = page_of(directory)
    assert says in page.text
    assert "Files that are missing or damaged" in page.text


@pytest.fixture
def recorded(run: Run) -> Path:
    """The directory of a run."""
    return Path(run(*LOGGED)["run_directory"])


def test_an_event_file_that_is_cut_gives_what_is_before(run: Run) -> None:
    directory = Path(run("logger=tensorboard", "trainer.log_every_n_steps=1")["run_directory"])
    whole = read_curves(directory)
    (path,) = (directory / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    cut = read_curves(directory)

    assert whole.problems == ()
    assert len(cut.problems) == 1
    assert "what follows is damaged, or not written to its end" in cut.problems[0]
    for name, points in cut.points.items():
        assert points.items() <= whole.points[name].items()
    assert 0 < sum(map(len, cut.points.values())) < sum(map(len, whole.points.values()))


def test_a_run_that_goes_on_is_no_failure(recorded: Path) -> None:
    summary = json.loads((recorded / "summary.json").read_text())
    (recorded / "summary.json").write_text(json.dumps(summary | {"status": "running", "metrics": {}}))
    assert "It has not ended, or nobody was left to write that it has." in page_of(recorded).text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=9),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(st.text(max_size=4), inside, max_size=2),
    max_leaves=4,
)
SHOWN = [*FACTS, *MACHINE, "error", "metrics", "monitor", "objective", "overrides", "global_step", "peak_memory_bytes"]


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(SHOWN), JSON))
def test_whatever_a_summary_says_there_is_a_page(values: dict[str, Any]) -> None:
    """Of the run, and of a sweep with it, in which texts are texts."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "0")
        job.mkdir()
        (job / "summary.json").write_text(json.dumps({"status": "finished", **values}))
        with redirect_stdout(None):
            page_of(job)
            page_of(job.parent)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "takes the directory of a run or of a sweep"),
        (["--help"], "takes the directory of a run or of a sweep"),
        (["a", "b", "c"], "takes the directory of a run or of a sweep"),
        (["nowhere"], "nowhere is no directory"),
        (["."], "There is no run in .: none of its folders"),
        ([".", "folder"], "folder is a folder. Give the name of the page in it"),
    ],
)
def test_a_wrong_request_says_what_to_give(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=re.escape(says)):
        report(arguments)


@given(st.lists(st.floats(width=32), min_size=1, max_size=300), st.integers(4, 40))
def test_a_thinned_curve_keeps_its_ends_and_extremes(values: list[float], most: int) -> None:
    points = {3 * step: value for step, value in enumerate(values)}
    steps, kept = thinned(points, most)

    assert steps == sorted({*steps})
    assert len(steps) <= max(most + 2, 0)
    assert {0, 3 * (len(values) - 1)} <= {*steps}
    assert kept == [points[step] if math.isfinite(points[step]) else None for step in steps]
    if all(map(math.isfinite, values)):
        assert {min(values), max(values)} <= {*kept}
