"""The same bits on any number of processes."""
