"""The only place that uses names which torch, Hydra, OmegaConf and Python keep private, or the wording of their errors.

A module for each topic, and in it an entry for each name: it says which one is used, and what is done where another
version has it no more. Where there is a public way, that is taken then; where there is none, the import or the call
fails and names what is missing. Whoever moves to a new version of a library looks here, and at
``tests/unit/test_compat.py``.
"""
