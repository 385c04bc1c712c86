"""The same training by other means. Each module is a program for one rank, which takes its orders from a ``Player``."""
