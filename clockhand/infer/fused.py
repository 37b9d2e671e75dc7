"""The step of many streams with fewer and faster products: what `ReferenceRunner` computes, for one id of every slot.

  * q, k and v come of one matrix, gate and up of one; on CPUs that multiply bf16, each lies in the order in which
    oneDNN reads it, so that no step sorts it again
  * a slot's G heads per kv head attend as G queries of one text: keys and values are read as they lie in the cache

Prompts, prefixes and memory are left to `ReferenceRunner`. The fused matrices are copies, made once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clockhand.infer.runner import ReferenceRunner, Runner
from clockhand.model.attend import Visibility
from clockhand.model.mlp import SwiGLU
from clockhand.model.rope import rotate, rotation
from clockhand.model.transformer import Transformer

Product = Callable[[Tensor], Tensor]  # (B, D) -> (B, N)


def is_fusible(model: Transformer) -> bool:
    """Whether `FusedRunner` can run `model`: dense, on a CPU, in fp32 or bf16, without `dynamic` scaling."""
    config, weight = model.config, model.token_embedding.weight
    first: Any = model.blocks[0]
    plain = all(type(each) is nn.Linear for each in (model.lm_head, first.attention.q_proj))
    kinds = (torch.float32, torch.bfloat16)
    return (
        plain
        and weight.device.type == "cpu"
        and weight.dtype in kinds
        and not config.is_moe
        and config.rope_scaling != "dynamic"
    )


def best_runner(model: Transformer, slots: int, max_seq_len: int, longest_row: int) -> Runner:
    """The fast runner where it can run `model`, else the plain one."""
    kind = FusedRunner if is_fusible(model) else ReferenceRunner
    return kind(model, slots, max_seq_len, longest_row)


def product(linears: Sequence[nn.Linear], rows: int) -> Product:
    """x -> the outputs of all `linears` side by side, in one product that is at its best for `rows` rows."""
    weight = torch.cat([each.weight.detach() for each in linears])  # (N, D)
    biases = [each.bias.detach() for each in linears if each.bias is not None]
    bias = torch.cat(biases) if biases else None
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        ordered = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, ordered, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


class FusedRunner(ReferenceRunner):
    """A `Runner` for models that are `is_fusible`."""

    @torch.no_grad()
    def __init__(self, model: Transformer, slots: int, max_seq_len: int, longest_row: int) -> None:
        super().__init__(model, slots, max_seq_len, longest_row)
        self._products: list[tuple[Product, Product, Product, Product]] = []
        blocks: list[Any] = list(model.blocks)
        for block in blocks:
            attention, mlp = block.attention, block.mlp
            qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
            up = [mlp.gate_proj, mlp.up_proj] if isinstance(mlp, SwiGLU) else [mlp.up_proj]
            parts = (qkv, [attention.o_proj], up, [mlp.down_proj])
            qkv_product, o_product, up_product, down_product = (product(part, slots) for part in parts)
            self._products.append((qkv_product, o_product, up_product, down_product))
        self._head = product([model.lm_head], slots)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def _step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One id for every slot that has position 0 or more, each (B, 1) -> (B, D)."""
        model, config, cache = self._model, self._model.config, self._cache
        pre, kv_heads, group = config.norm_position == "pre", config.n_kv_heads, config.group_size
        sees = Visibility(positions, cache.begin(positions), config.sliding_window)
        mask = sees.mask[:, None]  # (B, 1, 1, S)
        x = model.token_embedding(ids[:, 0])  # (B, D)
        if model.position_embedding is not None:
            x = x + model.position_embedding(positions[:, 0].clamp(min=0))
        turned = rotation(config, positions) if config.position == "rope" else None
        blocks: list[Any] = list(model.blocks)
        for layer, (block, products) in enumerate(zip(blocks, self._products)):
            qkv_product, o_product, up_product, down_product = products
            attention = block.attention
            qkv = qkv_product(block.attention_norm(x) if pre else x).view(len(x), 1, -1, config.head_dim)
            q, k, v = qkv.split([config.n_heads, kv_heads, kv_heads], dim=2)  # each (B, 1, heads, Dh)
            if config.qk_norm:
                q, k = attention.q_norm(q), attention.k_norm(k)
            if turned is not None:
                both = rotate(torch.cat((q, k), dim=2), *turned, config.rope_layout)
                q, k = both.split([config.n_heads, kv_heads], dim=2)
            keys, values = (each.transpose(1, 2) for each in cache.update(layer, k, v))  # (B, K, S, Dh)
            q = q.reshape(len(x), kv_heads, group, -1)
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)  # (B, K, G, Dh)
            update = o_product(attended.reshape(len(x), -1))
            x = x + update if config.residual else update
            if not pre:
                x = block.attention_norm(x)

            inner = up_product(block.mlp_norm(x) if pre else x)
            if isinstance(block.mlp, SwiGLU):
                gate, up = inner.chunk(2, dim=-1)
                inner = F.silu(gate) * up
            else:
                inner = block.mlp.activation(inner)
            update = down_product(inner)
            x = x + update if config.residual else update
            if not pre:
                x = block.mlp_norm(x)
        return model.final_norm(x)
