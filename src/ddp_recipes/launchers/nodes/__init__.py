"""One supervisor a node: nodes of a run are lost, and come, and the others go on. Loads torch when it launches."""

from ddp_recipes.launchers.nodes.launcher import NodesLauncher, NodesSettings

__all__ = ["NodesLauncher", "NodesSettings"]
