"""What turns a `StepBatch` into logits."""

from typing import Any, Protocol

from drumline.model.backends.torch_backend import TorchBackend
from drumline.model.batch import StepBatch, StepOutput
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel


class Backend(Protocol):
    """Computes one step over a model's weights and a K/V store."""

    name: str
    exact: bool
    """Whether a row's logits are the same bits whatever is computed beside it."""

    @property
    def arithmetic(self) -> str:
        """What computes, as far as bits may depend on it."""

    def forward(self, batch: StepBatch, kv: Any) -> StepOutput:
        """Write the batch's keys and values to `kv`, a store in this backend's layout; return the logits it wants."""


def make_backend(name: str | None, model: LanguageModel) -> Backend:
    """The backend of that name; None is the exact one where the model has one, else torch's.

    Raises `InvalidRequest` for one that does not exist, and for "cpu" where the model is not int8 on the CPU.
    """
    if name is None:
        name = "cpu" if model.exact else "torch"
    if name == "torch":
        return TorchBackend(model)
    if name != "cpu":
        raise InvalidRequest("backend", f"must be 'cpu' or 'torch' (got {name!r})")
    if not model.exact:
        raise InvalidRequest(
            "backend", f"'cpu' computes int8 models on the CPU, this one is {model.precision} on {model.device}"
        )
    from drumline.model.backends.cpu_backend import CpuBackend

    return CpuBackend(model)
