"""This package beside what one would pick instead, in one run: ``make bench``."""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # the folder of this script, which would hide installed packages

from benchmarks import checkpoints, figures, lines, order, startup, steps  # noqa: E402
from benchmarks.competitor import Failed  # noqa: E402
from benchmarks.results import OFF, Group, Row, Settings, table, write  # noqa: E402
from benchmarks.samples import DATA  # noqa: E402

GROUPS: dict[str, Callable[[Settings], Group]] = {
    **{name: partial(steps.measure, name) for name in (*steps.RACES, "transformer")},
    "startup": startup.measure,
    "memory": startup.measure_memory,
    "checkpoint": checkpoints.measure,
    "logging": lines.measure,
    "order": order.measure,
}
ON_CPU = [name for name in GROUPS if name != "transformer"]
ON_GPU = list(steps.GPU_RACES)
QUICK = [
    "toy",
    "mnist",
    "resnet",
    "startup",
    "order",
]  # the others' goals are no ratios, or ratios of small differences


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; return the exit status."""
    args = arguments(argv)
    there = ON_GPU if args.device == "cuda" else ON_CPU
    chosen = args.only.split(",") if args.only else [name for name in there if name in QUICK or not args.quick]
    if unknown := [name for name in chosen if name not in there]:
        print(
            f"--only={','.join(unknown)} is not measured on {args.device}. There are: {', '.join(there)}.",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the competitors, too
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else what is ours alone is compiled at each start
    settings = Settings(
        quick=args.quick,
        ranks=tuple(int(size) for size in (args.ranks or ("1" if args.device == "cuda" else "1,2")).split(",")),
        sessions=args.sessions or (1 if args.quick else 5),
        device=args.device,
        peers=not args.quick,
    )
    out = args.out or (None if args.quick else ROOT / "benchmarks" / "results")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ddp_recipes_bench_data_") as data:
        os.environ[DATA] = data
        try:
            for name in chosen:
                began = time.monotonic()
                group = GROUPS[name](settings)
                rows += group.rows
                print(f"\n{name}, {time.monotonic() - began:.0f} s\n{table(group.rows)}\n", flush=True)
                if out is not None:
                    write(out / f"{args.device}.json", name, group, settings)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
    if out is not None:
        figures.draw(out / f"{args.device}.json")
    print(table([row for row in rows if row.goal is not None]))
    failing = [row.what for row in rows if row.fails] if args.quick else []
    for what in failing:
        print(f"{what} is more than {OFF:g} times its goal.", file=sys.stderr)
    return 1 if failing else 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says; ``device=cuda`` is ``--device=cuda``, and so for the others."""
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under two minutes; fails if a ratio is far off its goal")
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(GROUPS)}")
    parser.add_argument("--ranks", metavar="NUMBERS", help="numbers of ranks (1,2; on a GPU 1)")
    parser.add_argument(
        "--sessions", type=int, metavar="N", help="times that everything is started afresh (5; quick: 1)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for json and figures (benchmarks/results; quick: none)"
    )
    return parser.parse_args([re.sub(r"^(?=\w+=)", "--", argument) for argument in argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
