"""Batched multi-request generation for small language models on machines of your own."""

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
from drumline.model.registry import load_model
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.config import VERSION as __version__
from drumline.scheduler.request import Choice, Chunk, Message, Request, Result
from drumline.scheduler.scheduler import Scheduler

__all__ = [
    "Choice",
    "Chunk",
    "DeadlineExceeded",
    "DrumlineError",
    "EngineFailed",
    "InvalidRequest",
    "JobCancelled",
    "Message",
    "ModelLoadError",
    "QueueFull",
    "Request",
    "Result",
    "SamplingParams",
    "Scheduler",
    "SchedulerClosed",
    "__version__",
    "load_model",
]
