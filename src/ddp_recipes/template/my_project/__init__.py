"""What is trained here: a model and data. conf/ names them."""
