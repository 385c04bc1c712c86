"""The fault campaign: runs that are killed, stopped, interrupted and damaged at random instants, and must all finish.

``python benchmarks/faults.py --runs 200 --seed 0 --mode both`` draws a script for each run (one to five faults, their
instants, the world size of every start), plays it on the real command, starts the same command again until the run has
finished, and compares what it left with the undisturbed run of one process.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.campaign import replacing, report
from benchmarks.campaign.files import write_shards
from benchmarks.campaign.judge import Reference, judge
from benchmarks.campaign.play import Player, cut_off
from benchmarks.campaign.report import Entry
from benchmarks.campaign.script import GOES_ON, KINDS, MODES, ON_SHARDS, PLAIN, SIZES, Mode, Script, draw

SEVERAL: dict[str, tuple[Mode, ...]] = {"both": ("local", "torchrun"), "stream": ("local", "replace")}
EXACT = {"ddp_exact": ["strategy=ddp_exact"], "fsdp": ["strategy=fsdp", "strategy.shards=12"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; return 0 if every run went as promised, else 1."""
    options = parse(argv)
    command = shlex.join(["python", "benchmarks/faults.py", *(sys.argv[1:] if argv is None else argv)])
    # Runs are to take Ctrl-C as at a terminal, also where this was put in the background by a shell that ignores it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)

    modes = SEVERAL.get(options.mode, (options.mode,))
    recipes = ON_SHARDS if options.mode == "stream" else PLAIN
    runs_of = dict(zip(modes, options.runs * len(modes), strict=False))  # one number is for each mode
    numbers = range(max(runs_of.values())) if options.only is None else [options.only]
    drawn = {"most": options.most, "sizes": options.sizes, "without": options.without, "recipes": recipes}
    then = replacing.resumed if options.resume else lambda script: script
    # Modes take turns, so that a campaign that is cut off has something to say on each.
    scripts = [
        then(replacing.draw(options.seed, mode, number, **drawn))
        if mode in GOES_ON
        else draw(options.seed, mode, number, **drawn, saves=options.saves)
        for number in numbers
        for mode in modes
        if number < runs_of[mode] or options.only is not None
    ]
    folder = Path(tempfile.mkdtemp(prefix="faults_"))
    wanted = [report.as_json(script) for script in scripts]
    runs = [run for run in report.read(options.out) if run["script"] in wanted]  # one that was cut off goes on
    done = [run["script"] for run in runs]
    entries: list[Entry] = []
    pool = ThreadPoolExecutor(options.jobs)
    try:
        campaign = Campaign(folder, options.strategy, options.sizes[0], recipes)
        left = [script for script, record in zip(scripts, wanted, strict=True) if record not in done]
        for future in [pool.submit(campaign.play, script) for script in left]:
            entries.append(future.result())
            runs.append(entries[-1].record())
            print(report.line(runs[-1]), flush=True)
            if options.out is not None:
                report.write(options.out, runs, command)
    except KeyboardInterrupt:
        cut_off.set()
        print("Cut off.", file=sys.stderr)
    finally:
        pool.shutdown(cancel_futures=True)
        print(f"\n{report.markdown(runs, command)}")
    if options.only is not None:
        show(entries)
    perfect = len(runs) == len(scripts) and not any(run["verdict"]["flaws"] for run in runs)
    if perfect and options.only is None:
        shutil.rmtree(folder)
    else:
        print(f"What is not as promised is kept in {folder}.", file=sys.stderr)
    return 0 if perfect else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def kinds(text: str) -> list[str]:
        if unknown := set(text.split(",")) - KINDS.keys():
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(KINDS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description="Disturb runs at random, and see that all of them finish.")
    add = parser.add_argument
    add("--runs", type=numbers, default=[20], help="for each mode, or as in 30,10 local and torchrun (default: 20)")
    add("--seed", type=int, default=0, help="what the runs are drawn from (default: %(default)s)")
    add("--mode", choices=[*MODES, *SEVERAL], default="both", help="who starts ranks (default: %(default)s)")
    add("--only", type=int, metavar="NUMBER", help="play this run alone, show its output, and keep its folder")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    add("--most", type=int, default=5, help="faults a run, at most; 0: none (default: %(default)s)")
    add("--sizes", type=numbers, default=[*SIZES], help="world sizes to draw from, as in 1,2,2,4; each divides 12")
    add("--without", type=kinds, default=[], help=f"kinds of faults to leave out, of {', '.join(KINDS)}")
    add("--saves", action="store_true", help="only faults in saves, and damage to what was saved")
    add("--resume", action="store_true", help="where ranks are replaced: what is done is done to a resumed run")
    add("--strategy", default="ddp_exact", help="or ddp, ddp_pipeline, 'fsdp strategy.replicas=2', with one size")
    add("--out", type=Path, help="json file for the record; runs that it has are not played again")
    options = parser.parse_args(argv)
    if options.strategy not in EXACT and len({*options.sizes}) > 1:
        parser.error(f"strategy={options.strategy} has other bits at each world size: give one, as in --sizes 4")
    return options


class Campaign:
    """Plays scripts, each in a folder of its own, which is kept if not all was as promised.

    Args:
        strategy: of every run. The undisturbed ones have ``ddp_exact`` on one rank, if its bits are promised.
        size: ranks of the undisturbed runs else.
        recipes: of the scripts.
    """

    def __init__(self, folder: Path, strategy: str, size: int, recipes: Sequence[str] = PLAIN) -> None:
        self.folder = folder
        self.strategy, self.in_parts = EXACT.get(strategy, f"strategy={strategy}".split()), strategy.startswith("fsdp")
        of_reference = (EXACT["ddp_exact"], 1) if strategy in EXACT else (self.strategy, size)
        if recipes == ON_SHARDS:
            write_shards(folder / "shards")
            os.environ["CAMPAIGN_SHARDS"] = str(folder / "shards")
        self.references = {name: self._reference(name, *of_reference) for name in recipes}

    def play(self, script: Script) -> Entry:
        """Play a script and judge it."""
        began = time.monotonic()
        folder = self.folder / f"{script.mode}_{script.number}"
        player = Player(script, folder, self.strategy, self.in_parts)
        played = player.play()
        verdict = judge(played, player.directory, self.references[script.recipe], self.in_parts)
        entry = Entry(script, played, verdict, time.monotonic() - began)
        if entry.perfect:
            shutil.rmtree(folder)
        return entry

    def _reference(self, recipe: str, strategy: Sequence[str], size: int) -> Reference:
        """Run a recipe undisturbed."""
        script = Script("local", 0, 0, recipe, faults=(), world_sizes=(size,), max_restarts=0, timeout_s=60)
        player = Player(script, self.folder / f"reference_{recipe}", strategy)
        played = player.play()
        if not played.finished:
            raise SystemExit(f"The undisturbed run of {recipe} failed:\n{played.starts[0].text}")
        return Reference.of(player.directory)


def show(entries: Sequence[Entry]) -> None:
    """Print the scripts, what was done, and what each start printed."""
    for entry in entries:
        print(f"\n{entry.script}")
        for number, started in enumerate(entry.played.starts):
            print(f"\n--- start {number}: {started.world_size} ranks, {started.seconds:.1f} s, status {started.status}")
            for done in entry.played.done:
                if done.start == number:
                    print(
                        f"    {done.fault}: rank {done.rank}, process {done.pid}, at step {done.step} {done.file or ''}"
                    )
            print(started.text)


if __name__ == "__main__":
    sys.exit(main())
