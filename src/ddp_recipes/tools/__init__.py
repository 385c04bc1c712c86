"""What runs instead of, or beside, training: dry run, equivalence check, profiling."""
