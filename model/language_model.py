"""A loaded model: description, weights, tokenizer and chat template, in the precision they are served in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drumline.model.chat import ChatTemplate
from drumline.model.config import ModelConfig
from drumline.model.errors import InvalidRequest
from drumline.model.ledger import Ledger
from drumline.model.tokenizer import Tokenizer
from drumline.model.weights import QuantisedWeight, Weights


@dataclass(frozen=True)
class LanguageModel:
    """What `load_model` returns and `Scheduler` serves.

    `window` is the served context in tokens (never above the model's own), `kv_dtype` the dtype of the K/V pool (int8:
    beside a float32 scale a token and head), `fingerprint` a hash of the weights' source, which says whether two
    answers are of the same model.
    """

    name: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    precision: str
    device: torch.device
    window: int
    kv_dtype: torch.dtype
    fingerprint: str
    slides: bool = False
    """Whether a full window slides unless the request says otherwise (the course model)."""

    @property
    def exact(self) -> bool:
        """True where ids and log-probability bits never depend on what runs beside a request: int8 on a CPU.

        Its products are whole numbers, exact in any order, and the rest of the "cpu" backend computes each token by
        itself. Float products round differently for different batch sizes, so no other precision can promise this.
        """
        return isinstance(self.weights.head, QuantisedWeight) and self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, and of weights that are not int8."""
        return self.weights.embedding.dtype

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain prompt, behind BOS where the tokenizer adds it (once); special tokens in it stay text."""
        ids, bos = self.tokenizer.encode(text), self.tokenizer.bos_id
        return [bos, *ids] if self.tokenizer.adds_bos and bos is not None and ids[:1] != [bos] else ids

    def started(self, ids: Sequence[int], field: str = "prompt") -> list[int]:
        """The ids, or BOS alone where there are none; raises `InvalidRequest` where the model has no BOS either."""
        if ids:
            return list(ids)
        if self.tokenizer.bos_id is None:
            raise InvalidRequest(field, "must not be empty: this model has no BOS token to start from")
        return [self.tokenizer.bos_id]

    def ledger(self, rows: int, tokens: int | None = None) -> Ledger:
        """Bytes that the weights and a pool of `rows` rows of `tokens` tokens (default: the window) take."""
        config = self.config
        return Ledger(
            layers=config.layers,
            rows=rows,
            kv_heads=config.kv_heads,
            tokens=self.window if tokens is None else tokens,
            head_dim=config.head_dim,
            element_bytes=self.kv_dtype.itemsize,
            scale_bytes=torch.float32.itemsize if self.kv_dtype == torch.int8 else 0,
            weight_bytes=sum(tensor.nbytes for tensor in self.weights.tensors()),
        )
