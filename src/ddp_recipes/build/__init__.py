"""From a checked config to the objects of a run."""
