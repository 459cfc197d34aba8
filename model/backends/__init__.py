"""What turns a `StepBatch` into logits."""

from typing import Protocol

from drumline.model.backends.torch_backend import StepOutput, TorchBackend
from drumline.model.batch import KVStore, StepBatch
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel


class Backend(Protocol):
    """Computes one step over a model's weights and a K/V store."""

    name: str

    def forward(self, batch: StepBatch, kv: KVStore) -> StepOutput:
        """Write the batch's keys and values to `kv` and return the logits it wants."""


def make_backend(name: str, model: LanguageModel) -> Backend:
    """The backend of that name; raises `InvalidRequest` for one that does not exist."""
    if name != "torch":
        raise InvalidRequest("backend", f"must be 'torch' (got {name!r})")
    return TorchBackend(model)
