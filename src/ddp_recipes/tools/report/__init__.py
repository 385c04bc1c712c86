"""``ddp-recipes report``: a run or a sweep as one page of HTML, made of the files that it left. Loads no torch."""

from collections.abc import Sequence
from pathlib import Path

from ddp_recipes.errors import RequestError

USAGE = "ddp-recipes report takes the directory of a run or of a sweep, and where to write the page if not there"
EXAMPLE = "ddp-recipes report outputs/2026-11-25/10-00-00 report.html"


def report(arguments: Sequence[str]) -> None:
    """Write ``report.html`` into the directory, or the page to a file that is named; print where it is.

    Raises:
        RequestError: there is no run in that directory, or the page cannot be written.
    """
    if not 1 <= len(arguments) <= 2 or any(argument.startswith("-") for argument in arguments):
        raise RequestError(f"{USAGE}, as in: {EXAMPLE}")
    directory = Path(arguments[0])
    target = Path(arguments[1]) if len(arguments) == 2 else directory / "report.html"
    if target.is_dir():
        raise RequestError(f"{target} is a folder. Give the name of the page in it: {target / 'report.html'}")
    page = _page(directory)
    from ddp_recipes.reporting.run_directory import write_text

    try:
        write_text(target, page, durable=False)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror}. Give another file: {EXAMPLE}") from None
    print(target)


def _page(directory: Path) -> str:
    from ddp_recipes.reporting.sweep import holds_run
    from ddp_recipes.tools.report.page import read_sweep, run_page, sweep_page
    from ddp_recipes.tools.report.records import read_record

    if not directory.is_dir():
        raise RequestError(f"{directory} is no directory. {USAGE}, as in: {EXAMPLE}")
    if holds_run(directory):
        return run_page(read_record(directory))
    sweep = read_sweep(directory)
    if not sweep.jobs:
        raise RequestError(
            f"There is no run in {directory}: none of its folders holds summary.json, or config.yaml and train.log."
        )
    return sweep_page(sweep)
