"""Which tests run, in what order, and with what: ``helpers.fixtures``, which loads torch where tests run."""

import gc
import random
import time

import pytest

STARTED = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, but not in the process that only hands tests to its workers."""
    if not config.getoption("numprocesses", None):
        for name in ("helpers.fixtures", "helpers.accelerator"):
            config.pluginmanager.import_plugin(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take ``--hourglass``: a sample of the tests, another one for each seed."""
    parser.addoption("--hourglass", type=float, metavar="SECONDS", help="begin tests, in any order, for so long only")
    parser.addoption("--hourglass-seed", default="", metavar="TEXT", help="what the order of --hourglass follows from")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first, for one worker runs all of a file; those whose tests run alone come last.

    Raises:
        UsageError: a file has tests of both kinds, whose worker would wait until all others have nothing left to do.
    """
    gc.freeze()  # what is there by now stays: collections need not look at it, nor copy it in forks
    alone = {item.path for item in items if item.get_closest_marker("alone")}
    if mixed := alone & {item.path for item in items if not item.get_closest_marker("alone")}:
        names = ", ".join(str(path) for path in mixed)
        raise pytest.UsageError(f"{names}: some tests are marked alone, others not. Give those files of their own.")
    if config.option.hourglass is not None:
        random.Random(config.option.hourglass_seed).shuffle(items)
    else:
        items.sort(key=lambda item: (item.path in alone, item.path.parent.name not in ("docs", "faults")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Pass over what comes when the sand of ``--hourglass`` has run out."""
    seconds = item.config.option.hourglass
    return True if seconds is not None and time.monotonic() > STARTED + seconds else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how much of the tests an hourglass has let through."""
    if config.option.hourglass is not None:
        ran = sum(len(reports) for kind, reports in terminalreporter.stats.items() if kind not in ("", "deselected"))
        seed = config.option.hourglass_seed
        terminalreporter.write_line(f"--hourglass {config.option.hourglass:g} --hourglass-seed '{seed}': {ran} tests")
