"""A model's parameters dealt to the ranks; those of a block are whole only while it runs."""
