"""The course model: a small decoder-only transformer that is trained here, and served like any other family.

Pre-norm blocks, learned absolute positions, explicit causal attention, a head of its own (untied). Its window slides:
positions are absolute, so a full window is recomputed from its last tokens.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from drumline.model.config import ModelConfig
from drumline.model.errors import ModelLoadError
from drumline.model.language_model import LanguageModel
from drumline.model.layers import causal_attention
from drumline.model.settings import Settings
from drumline.model.weights import LayerWeights, Take, Weights
from drumline.model.word_tokenizer import WordTokenizer

MODEL_TYPE = "drumline_course"
IGNORE_INDEX = -100
"""Targets of this value do not count in the loss."""

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each `[batch, heads, time, head_dim]`."""

_NORM_EPS = 1e-5
_MLP_RATIO = 4


class Output(TypedDict):
    """What `TransformerLM.forward` returns; `loss` is None without targets, the cache None where it was not asked."""

    logits: Tensor
    loss: Tensor | None
    past_key_values: tuple[KeyValue, ...] | None


@dataclass(frozen=True)
class CourseConfig:
    """Shapes of the course model; `block_size` is the longest context, in tokens. Raises `ValueError`."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    block_size: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.width // self.heads


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: CourseConfig) -> None:
        super().__init__()
        self.heads, width = config.heads, config.width
        self.attention_norm = nn.LayerNorm(width, eps=_NORM_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width, eps=_NORM_EPS)
        self.up = nn.Linear(width, _MLP_RATIO * width)
        self.down = nn.Linear(_MLP_RATIO * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, past: KeyValue | None) -> tuple[Tensor, KeyValue]:
        """`hidden` `[batch, time, width]` behind `past`; returns it changed, and all keys and values so far."""
        split = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = split.chunk(3, dim=1)
        offset = 0
        if past is not None:
            offset = past[0].shape[2]
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        mixed = causal_attention(query, key, value, offset).transpose(1, 2).flatten(2)
        hidden = hidden + self.dropout(self.output(mixed))
        hidden = hidden + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(hidden)))))
        return hidden, (key, value)


class TransformerLM(nn.Module):
    """Next-token model over a word vocabulary."""

    def __init__(self, config: CourseConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.block_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, eps=_NORM_EPS)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        past_key_values: Sequence[KeyValue] | None = None,
        use_cache: bool = False,
    ) -> Output:
        """Logits `[batch, time, vocab]` of int64 `input_ids` `[batch, time]`, whose positions follow the cached ones.

        `targets` (int64, the same shape; −100 is ignored) add the mean cross-entropy. `use_cache` returns the keys
        and values, for the next call. Raises `ValueError` for wrong ids, targets or cache, for more than `block_size`
        positions, and for cache arguments in training mode.
        """
        start = self._check_cache(input_ids, past_key_values, use_cache)
        if targets is not None:
            self._check_targets(input_ids, targets)
        positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        hidden = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        present: list[KeyValue] = []
        for index, block in enumerate(self.blocks):
            hidden, key_value = block(hidden, past_key_values[index] if past_key_values is not None else None)
            present.append(key_value)
        logits = self.head(self.final_norm(hidden))
        loss = None
        if targets is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        return {"logits": logits, "loss": loss, "past_key_values": tuple(present) if use_cache else None}

    def _check_cache(self, input_ids: Tensor, past: Sequence[KeyValue] | None, use_cache: bool) -> int:
        """Refuse what the contract refuses, ids first; returns the cached length."""
        config = self.config
        if input_ids.dtype != torch.int64 or input_ids.dim() != 2 or input_ids.numel() == 0:
            raise ValueError(
                f"input_ids must be int64 [batch, time], non-empty; got {input_ids.dtype} {list(input_ids.shape)}"
            )
        if int(input_ids.min()) < 0 or int(input_ids.max()) >= config.vocab_size:
            raise ValueError(f"input_ids must be in 0 … {config.vocab_size - 1}")
        if self.training and (past is not None or use_cache):
            raise ValueError("past_key_values and use_cache are for evaluation: call eval() first, or train without")
        cached = 0
        if past is not None:
            if len(past) != config.layers or any(len(pair) != 2 for pair in past):
                raise ValueError(f"past_key_values must hold one (K, V) for each of {config.layers} layers")
            cached = past[0][0].shape[2] if past[0][0].dim() == 4 else 0
            expected = (input_ids.shape[0], config.heads, cached, config.head_dim)
            for index, tensor in ((index, tensor) for index, pair in enumerate(past) for tensor in pair):
                if tuple(tensor.shape) != expected or tensor.device != input_ids.device:
                    raise ValueError(
                        f"past_key_values of layer {index}: {list(tensor.shape)} on {tensor.device}, expected "
                        f"{list(expected)} on {input_ids.device}, one length in all layers"
                    )
        if cached + input_ids.shape[1] > config.block_size:
            raise ValueError(
                f"{cached} cached and {input_ids.shape[1]} new tokens exceed block_size {config.block_size}: "
                f"drop the cache and recompute the window from its last {config.block_size} tokens"
            )
        return cached

    def _check_targets(self, input_ids: Tensor, targets: Tensor) -> None:
        if targets.dtype != torch.int64 or targets.shape != input_ids.shape:
            raise ValueError(
                f"targets must be int64 {list(input_ids.shape)}, got {targets.dtype} {list(targets.shape)}"
            )
        counted = targets[targets != IGNORE_INDEX]
        if counted.numel() == 0:
            raise ValueError(f"targets are all {IGNORE_INDEX}: there is nothing to learn from")
        if int(counted.min()) < 0 or int(counted.max()) >= self.config.vocab_size:
            raise ValueError(f"targets must be {IGNORE_INDEX} or in 0 … {self.config.vocab_size - 1}")


def save_checkpoint(folder: Path | str, model: TransformerLM, vocabulary: WordTokenizer) -> None:
    """Write config.json, model.safetensors and vocabulary.json, for `load_model` and `load_checkpoint`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model_type": MODEL_TYPE, **asdict(model.config)}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    save_file(_state(model), folder / "model.safetensors")
    vocabulary.save(folder / "vocabulary.json")


def load_checkpoint(folder: Path | str) -> tuple[TransformerLM, WordTokenizer]:
    """Read what `save_checkpoint` wrote, to train on; raises `ModelLoadError` for settings that are wrong."""
    folder = Path(folder)
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    config = read_config(settings)
    model = TransformerLM(
        CourseConfig(
            config.vocab_size, config.width, config.layers, config.heads, config.window, settings.get("dropout", 0.0)
        )
    )
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model, WordTokenizer.load(folder / "vocabulary.json")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The description of a saved course model; raises `ModelLoadError` naming the setting."""
    settings = Settings(hf)
    width, heads = settings.integer("width"), settings.integer("heads")
    if width % heads:
        raise ModelLoadError(f"width {width} is not a multiple of heads {heads}")
    return ModelConfig(
        architecture=MODEL_TYPE,
        vocab_size=settings.integer("vocab_size"),
        layers=settings.integer("layers"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn_width=_MLP_RATIO * width,
        window=settings.integer("block_size"),
        norm="layer",
        norm_eps=_NORM_EPS,
        activation="gelu",
        gated=False,
        positions="learned",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def build_weights(take: Take, config: ModelConfig) -> Weights:
    """Every tensor of the model, float32, under our names; `take` raises `ModelLoadError` for a wrong one."""
    width = config.width
    return Weights(
        embedding=take("token_embedding.weight", (config.vocab_size, width)),
        position_embedding=take("position_embedding.weight", (config.window, width)),
        layers=tuple(_layer(take, config, f"blocks.{index}") for index in range(config.layers)),
        final_norm=take("final_norm.weight", (width,)),
        final_norm_bias=take("final_norm.bias", (width,)),
        head=take("head.weight", (config.vocab_size, width)),
    )


def to_language_model(model: TransformerLM, vocabulary: WordTokenizer, name: str = "course") -> LanguageModel:
    """Serve a model straight from memory, as it is now: later training does not change what is served."""
    state = _state(model)
    config = read_config(asdict(model.config))
    digest = hashlib.sha256()
    for key, tensor in sorted(state.items()):
        digest.update(key.encode() + tensor.numpy().tobytes())
    return LanguageModel(
        name=name,
        config=config,
        weights=build_weights(lambda key, shape: state[key], config),
        tokenizer=vocabulary,
        chat_template=None,
        precision="float32",
        device=torch.device("cpu"),
        window=config.window,
        kv_dtype=torch.float32,
        fingerprint=digest.hexdigest(),
        slides=True,
    )


def _state(model: TransformerLM) -> dict[str, Tensor]:
    """Float32 copies on the CPU, by name."""
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, tensor in model.state_dict().items()
    }


def _layer(take: Take, config: ModelConfig, prefix: str) -> LayerWeights:
    width, ffn = config.width, config.ffn_width

    def tensor(name: str, *shape: int) -> Tensor:
        return take(f"{prefix}.{name}", shape)

    return LayerWeights(
        attention_norm=tensor("attention_norm.weight", width),
        attention_norm_bias=tensor("attention_norm.bias", width),
        qkv=tensor("qkv.weight", 3 * width, width),
        qkv_bias=tensor("qkv.bias", 3 * width),
        output=tensor("output.weight", width, width),
        output_bias=tensor("output.bias", width),
        mlp_norm=tensor("mlp_norm.weight", width),
        mlp_norm_bias=tensor("mlp_norm.bias", width),
        up=tensor("up.weight", ffn, width),
        up_bias=tensor("up.bias", ffn),
        down=tensor("down.weight", width, ffn),
        down_bias=tensor("down.bias", width),
    )
