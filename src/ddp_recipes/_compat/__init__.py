"""The only place that uses names which torch, Hydra, OmegaConf and Python keep private, or the wording of their errors.

A module for each topic, and in it an entry for each name; what Python does when it ends is here. An entry says which
name is used, and what is done where another version has it no more. Where there is a public way, that is taken then;
where there is none, the import or the call fails and names what is missing. Whoever moves to a new version of a library
looks here, and at ``tests/unit/test_compat.py``.
"""

import atexit
import threading


def join_threads() -> None:
    """Wait for threads that are no daemons, as the interpreter does: ``threading._shutdown``, or join each one."""
    shutdown = getattr(threading, "_shutdown", None)
    if shutdown is not None:
        shutdown()
        return
    own = threading.current_thread()
    for thread in threading.enumerate():
        if thread is not own and not thread.daemon:
            thread.join()


def can_run_exit_handlers() -> bool:
    """Whether :func:`run_exit_handlers` can do what it says; without it only ``sys.exit`` runs them."""
    return hasattr(atexit, "_run_exitfuncs")


def run_exit_handlers() -> None:
    """Run what was registered with ``atexit``, once: ``atexit._run_exitfuncs``."""
    atexit._run_exitfuncs()
