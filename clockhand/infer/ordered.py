"""Products with matrices in an order of their own: each is read from its first number to its last, sorted beforehand.

    order = order_of(config, torch.bfloat16)     which one, if any
    ordered = order.sort(matrices)               (L, N, K), or a list of L in an order that only oneDNN knows
    y = order.product(x, ordered[layer])         x (n, K) -> (n, N)

`Panels` is ours, a C++ function for processors with AVX-512 that reads 32 streams' weights at no cost but that of
multiplying (`ordered.cpp`). It is compiled when it is first needed, and kept beside the graphs (`graphs.py`), which
call it as they are. `OneDNN` is for all others; where neither can be had, matrices stay as they are (`Unsorted`).

In both orders a row's sums are to the bit the same whatever the number of rows; in `F.linear` they are not.
"""

import ctypes
import subprocess
import sys
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.allocator import use_large_pages
from clockhand.config import ModelConfig
from clockhand.disk import new_file
from clockhand.errors import ClockhandError
from clockhand.infer.graphs import cache_folder, compiler, key_of

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
    if whole_words and _library() is not None:
        return Panels()
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Unsorted()
    return OneDNN()


# ---- the C++ function ----


@cache
def _library() -> ctypes.CDLL | None:
    """`ordered.cpp`, compiled; None where it cannot be, or where oneDNN has better instructions than it (AMX)."""
    able = torch.cpu.get_capabilities()
    wanted = all(able.get(name) for name in ("avx512_f", "avx512_bw", "avx512_vl", "avx512_bf16"))
    if not sys.platform.startswith("linux") or not wanted or able.get("amx_tile"):
        return None
    code = Path(__file__).with_name("ordered.cpp")
    file = cache_folder() / f"ordered-{key_of([code.read_text()])}.so"
    if not file.is_file():
        if (program := compiler()) is None:
            return None
        own = Path(torch.__file__).parent
        how = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-I{own / 'include'}"]
        try:
            with new_file(file) as unfinished:
                command = [program, *how, str(code), f"-L{own / 'lib'}", "-ltorch_cpu", "-o", str(unfinished)]
                subprocess.run(command, capture_output=True, check=True)
        except (ClockhandError, OSError, subprocess.CalledProcessError):  # an old compiler, or nowhere to write
            return None
    return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)  # so that the graphs find it


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    library = _library()
    assert library is not None
    y = x.new_empty(len(x), len(matrix))
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (x, matrix, y)]
    sizes = [ctypes.c_int64(size) for size in (*y.shape, x.shape[1])]
    library.ordered_product(*pointers, *sizes, x.dtype == torch.bfloat16)
    return y


ordered_product = torch.library.custom_op("clockhand::ordered_product", _multiply, mutates_args=(), device_types="cpu")


@ordered_product.register_fake
def _(x: Tensor, matrix: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], matrix.shape[0])


C_FUNCTIONS = {
    torch.ops.clockhand.ordered_product.default: [
        "AOTITorchError aoti_torch_cpu_ordered_product(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*)"
    ]
}
"""What a compiled graph calls in place of the above."""
