"""A process as one of the ranks of a run: its world, job, messages, seeds and signals."""
