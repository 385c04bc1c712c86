"""What the tests of several folders share, imported as ``helpers``: pytest's ``pythonpath`` names their folder."""
