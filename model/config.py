"""What a model is, as data: both backends interpret this description, no family has a loop of its own."""

from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
Positions = Literal["learned", "rope"]
Scaling = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the context extensions that public checkpoints use.

    `factor`, `original_window` and the fields below them are read only by the scaling kinds that need them;
    `frequency_factors` divide the inverse frequencies one by one (GGUF ships llama3 scaling in this form).
    """

    theta: float = 10_000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    original_window: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and choices of a decoder-only transformer. `window` is the longest context, in tokens."""

    architecture: str
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_width: int
    window: int
    norm: Norm
    norm_eps: float
    activation: Activation
    gated: bool
    positions: Positions
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    sliding_window: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads

    @property
    def query_width(self) -> int:
        """Width of all query heads side by side."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads (or value heads) side by side."""
        return self.kv_heads * self.head_dim

    @property
    def attention_balance(self) -> float:
        """The position at which a token's attention takes as many multiply-adds as its matrix products."""
        projections = 2 * self.width * (self.query_width + self.kv_width)
        feed_forward = (3 if self.gated else 2) * self.width * self.ffn_width
        return (projections + feed_forward) / (2 * self.query_width)


# The 0.04B configuration that the project's golden figures are stated for.
GOLDEN = ModelConfig(
    architecture="llama",
    vocab_size=4_096,
    layers=12,
    width=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    ffn_width=1_408,
    window=1_024,
    norm="rms",
    norm_eps=1e-5,
    activation="silu",
    gated=True,
    positions="rope",
    rope=RopeConfig(),
    tied_head=True,
)
