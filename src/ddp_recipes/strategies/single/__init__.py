"""One process, no wrapper."""
