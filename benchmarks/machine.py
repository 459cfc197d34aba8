"""What the figures were measured on."""

import os
import platform
import socket
from pathlib import Path
from typing import Any

import psutil

_FEATURES = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimddp", "i8mm", "sve", "bf16"),
)


def describe_machine() -> dict[str, Any]:
    """CPU, usable cores, features that matter here, memory, and how busy it was before we began."""
    fields = _cpu_fields()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": [feature for feature in _FEATURES if feature in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average_1min": psutil.getloadavg()[0],
    }


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def native_bfloat16(machine: dict[str, Any]) -> bool:
    """Whether the CPU multiplies bfloat16 itself."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(machine["features"]))


def _cpu_fields() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; nothing on other systems."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
