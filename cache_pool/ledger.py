"""Whether a model and its pool fit this machine, asked before anything is allocated."""

import math
from pathlib import Path

import psutil
import torch

from drumline.model.errors import InvalidRequest
from drumline.model.ledger import Ledger

_HEADROOM = 0.95
"""Share of the free memory that a pool may take: activations and the host need some too."""


def available_bytes(device: torch.device) -> float:
    """Memory that is free now on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(int(psutil.virtual_memory().available), _container_bytes())


def _container_bytes() -> float:
    """What a container's memory limit (Linux control groups 2) leaves; infinite where there is none."""
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no such files, or the limit reads "max"
        return math.inf


def check_fits(ledger: Ledger, device: torch.device) -> None:
    """Raise `InvalidRequest` (field `rows`) with the ledger when the K/V pool would not fit beside the weights."""
    available = available_bytes(device)
    if ledger.kv_bytes > available * _HEADROOM:
        most = int(available * _HEADROOM) // (ledger.kv_bytes // ledger.rows)
        raise InvalidRequest(
            "rows",
            f"{ledger.rows} rows of {ledger.tokens} tokens take {ledger.kv_bytes / 1e9:.2f} GB of keys and values, "
            f"{available / 1e9:.2f} GB are free; at most {most} rows fit (or choose a smaller window)",
        )
