"""Why a sequence ended."""

from typing import Literal

StopReason = Literal["eos", "stop", "budget", "window", "cancelled", "deadline", "error"]
