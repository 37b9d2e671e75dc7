"""Which way tokens take through a model. There are three, and this function chooses; `--explain-route` prints it.

step         the C++ of `kernels/`: on a CPU, for every model, one text or many, through the engine
graph        a recorded CUDA graph (`static.py`): on a GPU, one text of a dense model
reference    the model's own blocks, one call of torch after another: everywhere, and what the others must equal
"""

from dataclasses import dataclass

from torch import nn

from clockhand.infer.kernels.library import find_library
from clockhand.infer.kernels.weights import foreign_module, step_precision
from clockhand.model.transformer import Transformer

DEFINITIONS = {
    "fp32": "fp32 matrices, activations and cache",
    "bf16": "bf16 matrices and cache, sums in fp32",
    "int8": "int8 matrices with a scale a row, fp32 cache",
    "int4": "int4 matrices with a scale for 32 columns, fp32 cache",
}


@dataclass(frozen=True)
class Route:
    """A way, and why it was taken."""

    name: str
    """step | graph | reference"""
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def route_of(model: nn.Module, rows: int = 1, plain: bool = False, explain: bool = False) -> Route:
    """The way for `rows` texts. `plain` asks for the reference, and `explain` for all stages of each draw."""
    if not isinstance(model, Transformer):
        return Route("reference", f"{type(model).__name__} is not clockhand's own Transformer")
    if plain:
        return Route("reference", "asked for (plain)")
    if explain:
        return Route("reference", "explanations are made where all logits of a draw are at hand")
    if model.device.type == "cuda":
        if rows > 1:
            return Route("reference", f"{rows} texts on a GPU are one padded batch")
        if model.config.is_moe:
            return Route("reference", f"n_experts = {model.config.n_experts}: no CUDA graph can choose experts")
        if model.training:
            return Route("reference", "the model is in training, and a recorded graph would keep its weights in place")
        return Route("graph", "one text on a GPU")
    if (why := why_no_step(model)) is not None:
        return Route("reference", why)
    found, _ = find_library()
    assert found is not None
    precision = step_precision(model)
    stored = str(model.dtype).removeprefix("torch.")
    as_stored = ", from float16 as it is stored" if stored == "float16" else ""
    return Route("step", f"{found.variant}, {DEFINITIONS[precision]}{as_stored}")


def why_no_step(model: Transformer) -> str | None:
    """Why the step in C++ cannot run `model`, in one line. None: it can."""
    if model.device.type != "cpu":
        return f"the step in C++ is for a CPU, and the model is on {model.device.type}"
    found, why = find_library()
    if found is None:
        return f"the step in C++ is not here: {why}"
    if (name := foreign_module(model)) is not None:
        return f"{name} is a layer that the step does not know"
    return None
