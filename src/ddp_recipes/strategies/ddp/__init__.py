"""torch's ``DistributedDataParallel``: one process a replica."""
