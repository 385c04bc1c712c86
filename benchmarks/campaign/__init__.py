"""The parts of the fault campaign, ``benchmarks/faults.py``: draw a script, play it, judge what came of it, report."""
