"""What Python does when it ends."""

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
