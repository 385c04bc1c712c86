"""What runs instead of training, or beside it: a module or folder a command, imported when it is asked for."""
