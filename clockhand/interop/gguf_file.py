"""The container GGUF, read as if every file came from an enemy: keys with values, then tensors by name.

    "GGUF"  version  number of tensors  number of keys
    keys     name, type, value                         a value is a number, a text, or a list of either
    tensors  name, dimensions, type, offset            fastest dimension first, so the reverse of our shapes
    padding  the tensors' bytes

Every claim is held against what the file has left before anything is allocated for it. What the keys and names mean is
in `gguf.py`. Files are written by the package `gguf`.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clockhand.errors import ClockhandError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# Far above any real file, and low enough that a hostile one cannot fill the memory with small objects.
MOST_KEYS = 100_000
MOST_TENSORS = 1_000_000
LONGEST_LIST = 10_000_000

_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_TEXT, _LIST = 8, 9

F32, Q8_0 = 0, 8
_TENSOR_TYPES = {F32: torch.float32, 1: torch.float16, 30: torch.bfloat16, Q8_0: torch.float32}
"""The types of tensors that we read, and what they become."""
_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
"""q8_0: 32 weights share one scale."""


class TensorInfo(NamedTuple):
    """Where a tensor lies and what it is."""

    shape: tuple[int, ...]
    type: int
    start: int  # byte of the file
    size: int  # bytes


class GGUFFile:
    """The keys and tensors of one file. Raises `ClockhandError` for a file that is not whole and sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size < 24:
            raise ClockhandError(f"{path} is too short for GGUF")
        self._content = np.memmap(path, mode="r")
        self._at = 0
        if self._take(4) != MAGIC:
            raise ClockhandError(f"{path} is not GGUF")
        version, n_tensors, n_keys = self._unpack("<IQQ")
        if version not in VERSIONS:
            raise ClockhandError(f"{path} is GGUF of version {version}, not {' or '.join(map(str, VERSIONS))}")
        self._at_most("keys", n_keys, MOST_KEYS)
        self._at_most("tensors", n_tensors, MOST_TENSORS)
        self.keys: dict[str, Any] = {}
        for _ in range(n_keys):
            name = self._text()
            if name in self.keys:
                raise ClockhandError(f"{path}: key '{name}' is there twice")
            self.keys[name] = self._value(self._unpack("<I")[0])
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(n_tensors):
            name = self._text()
            if name in self.tensors:
                raise ClockhandError(f"{path}: tensor {name} is there twice")
            self.tensors[name] = self._tensor_info(name)
        self._place()

    def read(self, name: str, part: int | None = None) -> Tensor:
        """A tensor in the type that it has in the file, fp32 for q8_0; with `part`, only that one of its first axis.

        The memory is the caller's own.
        """
        shape, type, start, size = self.tensors[name]
        if part is not None:
            size //= shape[0]
            start, shape = start + part * size, shape[1:]
        stored = np.array(self._content[start : start + size])
        if type == Q8_0:
            blocks = stored.view(_BLOCK)
            values = torch.from_numpy(blocks["values"].astype(np.float32))
            return (values * torch.from_numpy(blocks["scale"].astype(np.float32))[:, None]).view(shape)
        return torch.from_numpy(stored).view(_TENSOR_TYPES[type]).view(shape)

    def dtype(self, name: str) -> torch.dtype:
        """The type that `read` answers with."""
        return _TENSOR_TYPES[self.tensors[name].type]

    def is_f32(self, name: str) -> bool:
        """Whether a tensor is stored as fp32."""
        return self.tensors[name].type == F32

    def _take(self, size: int) -> bytes:
        if size > len(self._content) - self._at:
            raise ClockhandError(f"{self.path} claims {size} bytes at byte {self._at}, but ends before")
        self._at += size
        return self._content[self._at - size : self._at].tobytes()

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _at_most(self, what: str, claimed: int, limit: int) -> None:
        if claimed > limit:
            raise ClockhandError(f"{self.path} claims {claimed} {what}, more than {limit}")

    def _text(self) -> str:
        try:
            return self._take(self._unpack("<Q")[0]).decode()
        except UnicodeDecodeError:
            raise ClockhandError(f"{self.path}: the text before byte {self._at} is not UTF-8") from None

    def _value(self, type: int) -> Any:
        if type in _NUMBERS:
            return self._numbers(type, 1)[0]
        if type == _TEXT:
            return self._text()
        if type == _LIST:
            type, count = self._unpack("<IQ")
            self._at_most("entries in one list", count, LONGEST_LIST)
            if type == _TEXT:
                return [self._text() for _ in range(count)]
            if type in _NUMBERS:
                return self._numbers(type, count)
        raise ClockhandError(f"{self.path}: a value before byte {self._at} is of type {type}, which is not known")

    def _numbers(self, type: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[type])
        numbers = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if dtype == np.dtype("<f4"):
            # The shortest decimal that means this float: 1e-5, not 9.999999747378752e-06.
            return [float(str(number)) for number in numbers]
        return numbers.tolist()

    def _tensor_info(self, name: str) -> TensorInfo:
        (n_dims,) = self._unpack("<I")
        self._at_most(f"dimensions of {name}", n_dims, 4)
        shape = self._unpack(f"<{n_dims}Q")[::-1]
        type, offset = self._unpack("<IQ")
        count = math.prod(shape)
        if type not in _TENSOR_TYPES:
            raise ClockhandError(f"{self.path}: {name} is of type {type}; read are f32, f16, bf16 and q8_0")
        if type == Q8_0:
            if not shape or shape[-1] % 32:
                raise ClockhandError(f"{self.path}: {name} is q8_0, but its rows are no multiple of 32")
            return TensorInfo(shape, type, offset, count // 32 * _BLOCK.itemsize)
        return TensorInfo(shape, type, offset, count * _TENSOR_TYPES[type].itemsize)

    def _place(self) -> None:
        """Turns offsets into places in the file, now that the header's end is known."""
        alignment = self.keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ClockhandError(f"{self.path}: general.alignment = {alignment!r} must be a positive number")
        data = -(-self._at // alignment) * alignment
        total = 0
        for name, info in self.tensors.items():
            start = data + info.start
            if start % 4 or start + info.size > len(self._content):
                raise ClockhandError(f"{self.path}: {name} lies outside the file, or between its numbers")
            self.tensors[name] = info._replace(start=start)
            total += info.size
        if total > len(self._content):  # tensors that lie on each other would multiply the memory
            raise ClockhandError(f"{self.path}: its tensors have {total} bytes, more than the file")
