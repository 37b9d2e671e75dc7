"""Attention with weights: project, turn the hands, remember, attend, project back.

MHA, GQA and MQA differ only in the number of KV heads. `head_dim` is a field of its own: nothing here assumes that
H · Dh equals D. The rule of who sees whom is in `attend.py`, what is remembered in `cache.py`.
"""

from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.model.attend import Visibility, attend
from clockhand.model.cache import KVCache
from clockhand.model.norm import make_norm
from clockhand.model.rope import rotate


class Attention(nn.Module):
    """y = concat_h softmax(q_h·k_{h//G}ᵀ/√Dh)·v_{h//G} · W_o"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        qkv_bias, o_bias = config.attention_bias != "none", config.attention_bias == "all"
        self.q_proj = nn.Linear(config.d_model, width, bias=qkv_bias)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(width, config.d_model, bias=o_bias)
        self.q_norm = make_norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = make_norm(config, config.head_dim) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,  # (B, T, D)
        rotation: tuple[Tensor, Tensor] | None,  # cos and sin, each (B, T, Dh/2)
        sees: Visibility,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:  # (B, T, D)
        head_dim = self.config.head_dim
        q = self.q_proj(x).unflatten(-1, (-1, head_dim))  # (B, T, H, Dh)
        k = self.k_proj(x).unflatten(-1, (-1, head_dim))  # (B, T, K, Dh)
        v = self.v_proj(x).unflatten(-1, (-1, head_dim))  # (B, T, K, Dh)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q = rotate(q, *rotation, self.config.rope_layout)
            k = rotate(k, *rotation, self.config.rope_layout)
        if cache is not None:
            k, v = cache.update(layer, k, v)  # (B, S, K, Dh): everything remembered, these tokens included
        return self.o_proj(attend(q, k, v, sees).flatten(-2))
