"""What an exact answer depends on besides the request itself, as one hash."""

import hashlib
import json
from importlib.metadata import version

import torch

from drumline.model.language_model import LanguageModel


def fingerprint(model: LanguageModel, arithmetic: str) -> str:
    """Equal for two schedulers that owe the same request the same bits: the model's files, precision and K/V dtype, the
    backend's `arithmetic`, the versions of drumline, torch and numba, and what this CPU can do.

    Norms and scales are hashed as well: quantising is done by float products, and another CPU may smooth another way.
    """
    total = hashlib.sha256()
    for tensor in model.weights.tensors():
        if tensor.ndim == 1:
            total.update(tensor.detach().cpu().float().numpy().tobytes())
    parts = [model.fingerprint, total.hexdigest(), model.precision, str(model.kv_dtype), arithmetic]
    versions = [version(name) for name in ("drumline", "torch", "numba")]
    return hashlib.sha256(json.dumps([*parts, *versions, dict(torch.cpu.get_capabilities())]).encode()).hexdigest()
