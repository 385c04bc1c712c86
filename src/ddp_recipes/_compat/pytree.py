"""Nested containers of tensors: ``torch.utils._pytree``.

There is no public way: ``torch.utils.pytree`` is announced, and will have the same functions.
"""

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]
