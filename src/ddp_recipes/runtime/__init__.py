"""What a process knows and does as one of the ranks of a run."""
