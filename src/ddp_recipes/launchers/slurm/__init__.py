"""Runs submitted to Slurm: ``launcher=slurm``."""
