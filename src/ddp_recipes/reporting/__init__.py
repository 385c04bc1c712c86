"""What a run shows and records."""
