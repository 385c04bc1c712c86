"""Which samples come when, and how batches get to the device."""
