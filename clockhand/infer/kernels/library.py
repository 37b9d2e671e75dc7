"""The step's library for this processor, as Python calls it. The structures are those of `step.h`.

A call through `ctypes` lets go of the interpreter lock, so other threads of Python run during a step.
"""

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

from clockhand.errors import ClockhandError, unknown_name
from clockhand.infer.kernels.build import library_file, source_digest, variants

PRECISIONS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
MLPS = {"swiglu": 0, "gelu": 1, "relu": 2}

VARIABLE = "CLOCKHAND_STEP"
"""An environment variable that names the library to take, or `none`."""


class Matrix(Structure):
    _fields_ = [("data", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("rows", c_int32), ("columns", c_int32)]


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class Layer(Structure):
    _fields_ = [
        *[(name, Norm) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")],
        *[(name, Matrix) for name in ("qkv", "o")],
        ("router", c_void_p),
        *[(name, POINTER(Matrix)) for name in ("up", "down")],
    ]


class Model(Structure):
    _fields_ = [
        *[
            (name, c_int32)
            for name in (
                *("precision", "vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "d_ff"),
                *("experts", "experts_per_token", "renormalize", "layer_norm", "post_norm", "residual"),
                *("mlp", "interleaved", "window"),
            )
        ],
        ("norm_eps", c_float),
        ("embedding", Matrix),
        ("head", Matrix),
        ("learned", c_void_p),
        ("final_norm", Norm),
        ("layer", POINTER(Layer)),
    ]


class Call(Structure):
    _fields_ = [
        ("rows", c_int32),
        *[(name, c_void_p) for name in ("ids", "slots", "positions", "cos", "sin", "keys", "values")],
        ("capacity", c_int64),
        ("cache_bf16", c_int32),
        ("wanted", c_int32),
        ("wanted_rows", c_void_p),
        ("logits", c_void_p),
    ]


class Library:
    """One library that was loaded."""

    def __init__(self, variant: str, functions: ctypes.CDLL) -> None:
        self.variant = variant
        """The kind of processor that it is for."""
        functions.make_workspace.restype = c_void_p
        functions.free_workspace.argtypes = [c_void_p]
        functions.step.argtypes = [POINTER(Model), POINTER(Call), c_void_p, c_int32]
        functions.packed_bytes.restype = c_int64
        self.functions = functions

    @property
    def multiplies_bf16(self) -> bool:
        """Whether bf16 weights are multiplied by bf16 inputs; else the inputs stay in fp32."""
        return self.variant in ("amx", "v4-bf16")


@cache
def find_library(wanted: str | None = None) -> tuple[Library | None, str]:
    """The library for this processor, or the one of the variant `wanted`; where there is none, why."""
    wanted = wanted or os.environ.get(VARIABLE)
    if wanted == "none":
        return None, f"{VARIABLE}=none"
    if wanted is not None and wanted not in variants():
        raise unknown_name("step library", wanted, [*variants(), "none"], VARIABLE)
    why = "no library of the step was built (pip install builds it where there is a C++ compiler)"
    for variant in variants() if wanted is None else [wanted]:
        file = library_file(variant)
        if not file.exists():
            continue
        try:
            functions = ctypes.CDLL(str(file))
            functions.source_digest.restype = c_char_p
            functions.can_run.restype = c_int
            if functions.source_digest().decode() != source_digest():
                why = f"{file.name} was built from another source: install clockhand again"
            elif functions.can_run():
                return Library(variant, functions), ""
            else:
                why = f"{file.name} needs a processor of another kind"
        except (OSError, AttributeError) as error:
            why = f"{file.name} cannot be loaded: {error}"
    return None, why


def library() -> Library:
    """The library for this processor. Raises `ClockhandError` where there is none."""
    found, why = find_library()
    if found is None:
        raise ClockhandError(f"the step in C++ is not here: {why}")
    return found
