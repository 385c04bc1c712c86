"""What became of a run, decided by what its ranks reported and by how the others died."""

import math
from pathlib import Path
from typing import Any

import pytest

from ddp_recipes.errors import Preempted, RecipeError, RequestError, RunFailed
from ddp_recipes.launchers import Death, Outcome, RankReport, decide
from ddp_recipes.runtime.job import Job

SAVED = Preempted("Stopped by SIGTERM at step 3, after a checkpoint was saved.", checkpoint="last.pt")
DEATH = Death(1, "Rank 1 (process 7) was killed by SIGKILL, without a traceback.\nThe last lines.")


def raised(error: BaseException) -> BaseException:
    """Return an error that has a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def finished(rank: int) -> RankReport:
    return RankReport(rank=rank, kind="summary", summary={"rank": rank, "metrics": {"val/loss": 0.5}})


def failed(rank: int, error: BaseException) -> RankReport:
    return RankReport.of_error(rank, raised(error))


def outcome(*reports: RankReport, deaths: tuple[Death, ...] = (), **more: Any) -> Outcome:
    return decide({report.rank: report for report in reports}, deaths, **more)


# --- a report ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "report",
    [
        finished(0),
        failed(2, SAVED),
        failed(0, RequestError("no")),
        failed(1, RunFailed("lost\nrank 3", rank=3, unresponsive=[3, 4])),
        failed(1, ValueError("the cat sat on the keyboard")),
    ],
    ids=lambda report: report.kind,
)
def test_report_goes_through_one_line_of_text(report: RankReport) -> None:
    text = report.to_json()
    assert "\n" not in text
    assert RankReport.from_json(text) == report


def test_report_keeps_a_metric_that_is_not_finite() -> None:
    report = RankReport.from_json(RankReport(rank=0, kind="summary", summary={"val/loss": math.nan}).to_json())
    assert report.summary is not None
    assert math.isnan(report.summary["val/loss"])


@pytest.mark.parametrize(
    ("error", "kind", "exit_status"),
    [
        (RequestError("no"), "refused", 2),
        (SAVED, "preempted", 75),
        (RunFailed("lost"), "failed", 1),
        (ValueError("odd"), "failed", 1),
        (KeyboardInterrupt(), "failed", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_report_has_the_exit_status_of_its_error(error: BaseException, kind: str, exit_status: int) -> None:
    report = failed(1, error)
    assert (report.kind, report.exit_status) == (kind, exit_status)
    assert report.message.startswith(str(error) if isinstance(error, RecipeError) else "Traceback")


@pytest.mark.parametrize(("culprit", "cause"), [(None, True), (1, True), (0, False)])
def test_report_says_whether_the_rank_failed_by_itself(culprit: int | None, cause: bool) -> None:
    assert failed(1, RunFailed("lost", rank=culprit)).cause is cause


# --- the decision -----------------------------------------------------------------------------------------------------


def test_decide_returns_the_summary_of_rank_0() -> None:
    assert outcome(finished(1), finished(0)) == Outcome(finished(0).summary or {})


def error_of(became: Outcome, kind: type[BaseException]) -> BaseException:
    assert type(became.result) is kind
    assert isinstance(became.result, BaseException)
    return became.result


def test_decide_puts_a_refusal_before_all_else() -> None:
    became = outcome(failed(0, ValueError("odd")), failed(2, RequestError("no")), deaths=(DEATH,), signals=["SIGINT"])
    assert str(error_of(became, RequestError)) == "no"
    assert became.line == ""  # refused runs leave nothing


def test_decide_names_a_dead_rank_before_those_that_failed_of_it() -> None:
    became = outcome(failed(0, RuntimeError("connection closed")), deaths=(DEATH,))
    assert str(error_of(became, RunFailed)) == DEATH.message
    assert getattr(became.result, "rank", None) == 1
    assert (became.line, became.known_better) == (DEATH.message.splitlines()[0], True)


def test_decide_names_the_first_failure_that_no_other_rank_caused() -> None:
    consequence = failed(0, RunFailed("rank 2 failed", rank=2))
    first, second = failed(2, ValueError("odd")), failed(1, ValueError("later"))
    became = outcome(consequence, second, first)
    assert str(error_of(became, RunFailed)).startswith("Rank 2 failed:\nTraceback")
    assert (became.line, became.known_better) == ("rank 2: ValueError: odd", False)


def test_decide_adds_the_ranks_that_were_killed_to_a_failure() -> None:
    became = outcome(failed(0, ValueError("odd")), killed=[1, 2])
    assert str(error_of(became, RunFailed)).endswith("Rank 1, 2 did not respond and was killed.")
    assert (became.line, became.known_better) == (
        "rank 0: ValueError: odd Rank 1, 2 did not respond and was killed.",
        True,
    )


def test_decide_names_a_killed_rank_when_nobody_failed() -> None:
    became = outcome(finished(0), killed=[1])
    assert str(error_of(became, RunFailed)) == became.line == "Rank 1 did not respond and was killed."


@pytest.mark.parametrize(("name", "shown"), [("SIGINT", "Ctrl-C"), ("SIGUSR1", "SIGUSR1")])
def test_decide_names_the_signal_that_the_launcher_got(name: str, shown: str) -> None:
    became = outcome(failed(0, SAVED), failed(1, SAVED), signals=[name])
    error = error_of(became, Preempted)
    assert str(error) == became.line == f"Stopped by {shown} at step 3, after a checkpoint was saved."
    assert became.known_better
    assert getattr(error, "checkpoint", None) == "last.pt"


@pytest.mark.parametrize("lost", [{"deaths": (DEATH,)}, {"killed": [1]}], ids=["died", "killed"])
def test_decide_is_interrupted_if_a_signal_came_before_a_checkpoint(lost: dict[str, Any]) -> None:
    became = outcome(finished(0), signals=["SIGINT", "SIGTERM"], **lost)
    error_of(became, KeyboardInterrupt)
    assert became.line == "stopped by SIGINT before a checkpoint was saved"


def test_decide_is_interrupted_if_a_rank_died_of_the_signal_and_another_one_failed_of_that() -> None:
    asked = Death(1, "Rank 1 (process 7) was killed by SIGTERM, without a traceback.", asked=True)
    lost = failed(0, RuntimeError("Connection reset by peer"))
    error_of(outcome(lost, deaths=(asked,), signals=["SIGINT"]), KeyboardInterrupt)
    assert str(error_of(outcome(lost, deaths=(asked,)), RunFailed)).startswith("Rank 1 (process 7) was killed by SIG")
    error_of(outcome(lost, deaths=(DEATH,), signals=["SIGINT"]), RunFailed)


def test_decide_returns_the_summary_if_a_signal_came_after_the_end() -> None:
    assert outcome(finished(0), finished(1), signals=["SIGINT"]).result == finished(0).summary


def test_decide_says_what_the_launcher_knows_if_no_rank_reported() -> None:
    became = outcome(otherwise="Slurm job 4711 ended (timeout).\nThe last lines.")
    assert str(error_of(became, RunFailed)).endswith("The last lines.")
    assert became.line == "Slurm job 4711 ended (timeout)."


# --- what is left of it -----------------------------------------------------------------------------------------------


def test_conclude_writes_a_failure_where_rank_0_wrote_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(RunFailed, match="was killed by SIGKILL"):
        outcome(deaths=(DEATH,)).conclude(Job({}, tmp_path))
    assert DEATH.message.splitlines()[0] in (tmp_path / "summary.json").read_text()


def test_conclude_leaves_nothing_of_a_run_that_never_began(tmp_path: Path) -> None:
    with pytest.raises(RunFailed):
        outcome(deaths=(DEATH,)).conclude(Job({}, tmp_path))
    assert list(tmp_path.iterdir()) == []
