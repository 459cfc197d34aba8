"""How kernels are compiled: numba without fastmath, one thread pool, a cache of our own.

Without fastmath LLVM may neither reorder a sum nor fuse a product into it, nor assume that nothing is NaN: a kernel's
bits are those of its source, whatever the CPU's vector width and however many threads share the work.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numba
import torch

from drumline.model import random_state
from drumline.model.user_cache import cache_folder

Kernel = Callable[..., Any]

_log = logging.getLogger("drumline")
_MOST_VERSIONS = 4
_config: Any = numba.config  # its attributes are set from the environment


def kernel(function: Kernel) -> Kernel:
    """Compile at the first call, without the GIL, and keep the machine code in our cache folder."""
    return _compile(function, parallel=False)


def parallel_kernel(function: Kernel) -> Kernel:
    """The same, with `numba.prange` loops shared out among threads."""
    return _compile(function, parallel=True)


def inlined(function: Kernel) -> Kernel:
    """A helper that becomes part of each kernel that calls it.

    numba compiles a copy for each type of argument, and a literal or `prange`'s unsigned index is a type of its own:
    hand it `np.int64(0)`.
    """
    compiled: Kernel = numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)
    return compiled


def _compile(function: Kernel, parallel: bool) -> Kernel:
    with _cache_in(_machine_code_folder()) as cached:
        compiled: Kernel = numba.njit(
            nogil=True, boundscheck=False, error_model="numpy", parallel=parallel, cache=cached
        )(function)
    return compiled


@contextmanager
def _cache_in(folder: Path | None) -> Iterator[bool]:
    """numba reads its cache folder when a function is decorated: ours for our functions, the host's for the host's."""
    before = _config.CACHE_DIR
    if folder is not None:
        _config.CACHE_DIR = str(folder)
    try:
        yield folder is not None
    finally:
        _config.CACHE_DIR = before


@cache
def _machine_code_folder() -> Path | None:
    """A folder for the sources as they are now: numba looks at a function's own file only, not at what it inlines."""
    sources = hashlib.sha256()
    for source in (*sorted(Path(__file__).parent.glob("*.py")), Path(random_state.__file__)):
        sources.update(source.read_bytes())
    try:
        folder = cache_folder() / f"kernels-{sources.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder.parent)
    except OSError as error:
        _log.warning("kernels are compiled anew at each start: they cannot be kept (%s)", error)
        return None
    if not os.access(folder, os.W_OK):  # numba would refuse to compile at all
        _log.warning("kernels are compiled anew at each start: %s cannot be written", folder)
        return None
    return folder


def _prune(cache: Path) -> None:
    """Keep the machine code of the last few versions: a folder of each is left behind by every upgrade."""
    folders = sorted(cache.glob("kernels-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[_MOST_VERSIONS:]:
        shutil.rmtree(folder, ignore_errors=True)


def use_threads() -> int:
    """Let this thread's kernels use as many threads as torch does, and say how many. Choose the pool at the first call.

    OpenMP's pool is torch's own, so their work alternates without two pools spinning against each other.
    """
    if _config.THREADING_LAYER == "default":
        _config.THREADING_LAYER = "omp" if _has_openmp() else "workqueue"
    threads = min(torch.get_num_threads(), _config.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    return int(threads)


@cache
def _has_openmp() -> bool:
    if find_spec("numba.np.ufunc.omppool") is None:
        return False
    try:
        import numba.np.ufunc.omppool  # noqa: F401
    except ImportError:  # no libgomp on this system
        _log.warning("libgomp is missing: kernels use numba's own thread pool, which costs speed (Debian: libgomp1)")
        return False
    return True
