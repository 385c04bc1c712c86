"""torch's ``DataParallel``: one process, several GPUs."""
