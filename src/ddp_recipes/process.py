"""What this process asks of Linux about itself."""

import signal


def die_with_parent() -> None:
    """Be killed when the process that started this one dies, also where this one cannot run."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    _prctl(set_parent_death_signal, signal.SIGKILL)


def set_name(name: str) -> None:
    """Show this name in ``ps -o comm`` and ``top``, up to 15 characters of it."""
    set_name = 15  # PR_SET_NAME
    _prctl(set_name, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, argument)
