"""What a model is: its shape, the presets by name, and what a shape has to fulfil before anything is built."""
import dataclasses
import difflib

from model.errors import UserError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU; every flag below is part of the shape.

    hidden is D, heads H, kv_heads K, head_dim Dh, ffn F, vocab V, layers L of the vocabulary in README.
    tied: the head is the embedding, one matrix used twice.
    """
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    def __post_init__(self):
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions"):
            if getattr(self, field) < 1:
                raise UserError(f"model {self.name}: {field} is {getattr(self, field)}; it has to be at least 1")
        # rows of every matrix then start on 16 bytes (TMA) and every tensor of a layout on 256
        for field, multiple in (("hidden", 64), ("ffn", 16)):
            if getattr(self, field) % multiple:
                raise UserError(f"model {self.name}: {field} {getattr(self, field)} is not a multiple of {multiple}")
        if self.head_dim not in (16, 32, 64, 128, 256):
            raise UserError(f"model {self.name}: head width {self.head_dim}; kernels take 16, 32, 64, 128, 256")
        if self.heads % self.kv_heads:
            raise UserError(f"model {self.name}: {self.heads} heads do not share {self.kv_heads} kv heads evenly")

    @property
    def qkv_width(self) -> int:
        """Columns of the fused projection: (H + 2K) Dh."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention_width(self) -> int:
        """Columns of the attention output: H Dh."""
        return self.heads * self.head_dim


def _preset(name, layers, hidden, heads, kv_heads, ffn, vocab, max_positions, head_dim=128, **more) -> ModelConfig:
    return ModelConfig(name, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, max_positions, **more)


_LLAMA3 = dict(rope_theta=500_000.0, norm_eps=1e-5)
_QWEN2 = dict(rope_theta=1_000_000.0, qkv_bias=True)

# figures of the published config.json files; `120b` is the largest of MegaTrain's evaluation, arXiv 2604.05091
PRESETS: dict[str, ModelConfig] = {c.name: c for c in (
    _preset("tiny", 4, 128, 2, 1, 384, 257, 4096, head_dim=64, tied=True),
    _preset("smollm2-135m", 30, 576, 9, 3, 1536, 49152, 8192, head_dim=64, rope_theta=100_000.0, tied=True),
    _preset("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, 131072, norm_eps=1e-6, **_QWEN2),
    _preset("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, **_LLAMA3),
    _preset("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, 40960, rope_theta=1_000_000.0, norm_eps=1e-6, qk_norm=True),
    _preset("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, 131072, norm_eps=1e-5, **_QWEN2),
    _preset("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, 131072, norm_eps=1e-5, **_QWEN2),
    _preset("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, **_LLAMA3),
    _preset("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, 131072, norm_eps=1e-5, **_QWEN2),
    _preset("120b", 76, 12288, 96, 8, 32768, 128256, 131072, **_LLAMA3),
)}


def preset(name: str) -> ModelConfig:
    """The preset of that name; UserError with the nearest names if there is none."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UserError(f"--model {name}: no such model{hint} (all: {', '.join(PRESETS)})")
