"""Pictures that a run leaves behind, where matplotlib is installed."""
