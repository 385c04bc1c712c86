"""Checkpoints: files, which are kept, and how they are written."""
