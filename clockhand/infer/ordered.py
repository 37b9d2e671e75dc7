"""Products with matrices in an order of their own: each is read from its first number to its last, sorted beforehand.

    order = order_of(config, torch.bfloat16)     which one, if any
    ordered = order.sort(matrices)               (L, N, K), or a list of L in an order that only oneDNN knows
    y = order.product(x, ordered[layer])         x (n, K) -> (n, N)

`Panels` is ours, for the C++ function in `ordered.cpp` (`native.py`), which reads the weights of 32 streams at no cost
but that of multiplying. `OneDNN` is for all other machines; where that is missing too, matrices stay as they are.

In both orders a row's sums are to the bit the same whatever the number of rows; in `F.linear` they are not.
"""

from abc import ABC, abstractmethod
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.allocator import use_large_pages
from clockhand.config import ModelConfig
from clockhand.infer.native import call, native, operator

OUTPUTS = 32
"""Of a panel, as in `ordered.cpp`."""


class Order(ABC):
    """Stateless; all of a kind are alike."""

    @abstractmethod
    def sort(self, matrices: Tensor) -> Tensor | list[Tensor]:
        """`matrices` (L, N, K), each in this order."""

    @abstractmethod
    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """x (n, K) and one of `sort` -> (n, N), in the type of x, summed in fp32."""


class Unsorted(Order):
    def sort(self, matrices: Tensor) -> Tensor:
        return matrices

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        return F.linear(x, matrix)


class OneDNN(Order):
    def sort(self, matrices: Tensor) -> list[Tensor]:
        rows = 32  # orders for 8 and for 256 were as fast (LOG.md)
        return [torch.ops.mkldnn._reorder_linear_weight(each, rows) for each in matrices]

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")


class Panels(Order):
    def sort(self, matrices: Tensor) -> Tensor:
        count, outputs, width = matrices.shape
        word = 4 // matrices.element_size()  # numbers in one
        steps = matrices.unflatten(2, (-1, word)).transpose(1, 2)  # (L, K/word, N, word)
        sorted_ = torch.empty_like(matrices).view(count, -1)
        for first in range(0, outputs, OUTPUTS):
            panel = steps[:, :, first : first + OUTPUTS]  # (L, K/word, 32, word)
            sorted_[:, first * width :][:, : panel[0].numel()] = panel.flatten(1)
        use_large_pages(sorted_)
        return sorted_.view_as(matrices)

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        multiply = ordered_product if torch.compiler.is_compiling() else _multiply
        return multiply(x.contiguous(), matrix)


@cache
def order_of(config: ModelConfig, dtype: torch.dtype) -> Order:
    """The fastest for the matrices of a model in `dtype` on this machine."""
    widths = (config.d_model, config.n_heads * config.head_dim, config.d_ff)
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return Unsorted()
    whole_words = dtype == torch.float32 or all(width % 2 == 0 for width in widths)
    if whole_words and native() is not None:
        return Panels()
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Unsorted()
    return OneDNN()


# ---- the C++ function ----


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    y = x.new_empty(len(x), len(matrix))
    call("ordered_product", [x, matrix, y], [*y.shape, x.shape[1]], x.dtype == torch.bfloat16)
    return y


ordered_product = operator("ordered_product", _multiply, lambda x, matrix: x.new_empty(x.shape[0], matrix.shape[0]))
