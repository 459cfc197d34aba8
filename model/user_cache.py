"""The one folder we write to unasked: packed weights and compiled kernels, all of which can be made again."""

import os
import sys
from pathlib import Path

ENVIRONMENT = "DRUMLINE_CACHE"


def cache_folder() -> Path:
    """`$DRUMLINE_CACHE`, else the platform's own place for caches, with our name. It need not exist yet.

    Raises `OSError` where the user has no home folder and nothing else is set.
    """
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "drumline"
    try:
        return _in_home()
    except RuntimeError as error:
        raise OSError(f"there is no home folder for a cache; set {ENVIRONMENT}") from error


def _in_home() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "drumline"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "drumline" / "Cache"
    return Path.home() / ".cache" / "drumline"
