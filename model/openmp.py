"""One OpenMP pool for torch and numba, and whose turn it is. Imports neither: it has to run before them."""

import ctypes
import sys
import threading

LOCK = threading.RLock()
"""Held while a step computes on the CPU. Two schedulers in one process take turns: side by side their threads would
spin against one another, and numba's own pool (used where there is no OpenMP) does not bear two callers at all."""


def share_pool() -> None:
    """Load the system's libgomp for everyone, before torch loads the copy that it ships.

    numba's `omp` layer is bound to the system's library. With two of them in a process, the threads of one pool spin
    against those of the other: 15 % of a step even on a quiet machine. Where there is no system libgomp, numba falls
    back to a pool of its own. Does nothing once torch is imported.
    """
    if sys.platform == "linux" and "torch" not in sys.modules:
        try:
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        except OSError:
            return
