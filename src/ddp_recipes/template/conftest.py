"""Lets tests import this folder, and fork ranks, which torch does not survive once it has run on several threads."""

import torch

torch.set_num_threads(1)
