"""Batched multi-request generation for small language models on machines of your own.

The names are looked up at their first use: the command line must set OpenMP's spin before torch is imported, and a
host that only catches our errors need not wait for torch. Import drumline before torch: the two then share one thread
pool with our kernels (`model/openmp.py`).
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from drumline.model.openmp import share_pool

if TYPE_CHECKING:
    from drumline.model.errors import (
        DeadlineExceeded,
        DrumlineError,
        EngineFailed,
        InvalidRequest,
        JobCancelled,
        ModelLoadError,
        QueueFull,
        SchedulerClosed,
    )
    from drumline.model.grammar import JsonSchema, Lark, Regex
    from drumline.model.registry import load_model
    from drumline.model.sampling_params import SamplingParams
    from drumline.scheduler.config import VERSION as __version__  # noqa: N811
    from drumline.scheduler.request import Choice, Chunk, Message, Request, Result
    from drumline.scheduler.scheduler import Scheduler

logging.getLogger("drumline").addHandler(logging.NullHandler())  # whoever wants to read us says where

_HOMES = {
    "drumline.model.errors": (
        *("DeadlineExceeded", "DrumlineError", "EngineFailed", "InvalidRequest"),
        *("JobCancelled", "ModelLoadError", "QueueFull", "SchedulerClosed"),
    ),
    "drumline.model.grammar": ("JsonSchema", "Lark", "Regex"),
    "drumline.model.registry": ("load_model",),
    "drumline.model.sampling_params": ("SamplingParams",),
    "drumline.scheduler.request": ("Choice", "Chunk", "Message", "Request", "Result"),
    "drumline.scheduler.scheduler": ("Scheduler",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Choice",
    "Chunk",
    "DeadlineExceeded",
    "DrumlineError",
    "EngineFailed",
    "InvalidRequest",
    "JobCancelled",
    "JsonSchema",
    "Lark",
    "Message",
    "ModelLoadError",
    "QueueFull",
    "Regex",
    "Request",
    "Result",
    "SamplingParams",
    "Scheduler",
    "SchedulerClosed",
    "__version__",
    "load_model",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("drumline.scheduler.config").VERSION
    share_pool()
    if name not in _HOME_OF:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
