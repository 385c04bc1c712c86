"""Who starts the ranks of one run: one file a launcher. None of them loads torch before it has to."""
