"""The model in stages, one process a stage, and replicas of it."""
