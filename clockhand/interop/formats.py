"""Which format a file is of, told by its content, and the two ways through it: `import_model` and `export_model`.

    hf          a folder of Hugging Face, and of ours        in and out    hf.py
    gguf        a file of llama.cpp                          in and out    gguf.py
    llama2c     a .bin of llama2.c                           in and out    llama2c.py
    minimind    a .pth of MiniMind                           in            minimind.py

Importing makes a model folder; exporting makes the other thing out of one.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError, unknown_name
from clockhand.interop import gguf, gguf_file, hf, llama2c, minimind, names
from clockhand.interop.folders import weight_files
from clockhand.model.packed import packed
from clockhand.model.transformer import Transformer

EXPORTS = ("hf", "gguf", "llama2c")
TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Found:
    """A model out of a foreign file."""

    format: str
    model: Transformer
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class Imported:
    """What `import_model` did."""

    format: str
    folder: Path
    parameters: int
    notes: list[str]
    """What the user should know."""


@dataclass(frozen=True)
class Exported:
    """What `export_model` did."""

    format: str
    path: Path
    notes: list[str]
    """What the user should know."""


def recognize(path: Path) -> str:
    """The format of a file or folder, by its content. Raises `ClockhandError` when it is none of ours."""
    if path.is_dir():
        return "hf"
    if not path.is_file():
        raise ClockhandError(f"'{path}' does not exist")
    with open(path, "rb") as file:
        start = file.read(llama2c.LONG_HEADER)
    if start.startswith(gguf_file.MAGIC):
        return "gguf"
    if start.startswith(b"PK\x03\x04"):  # a zip: what torch.save writes
        return "minimind"
    if start.startswith(b"\x80"):
        raise ClockhandError(f"{path} is a bare pickle, which could run code; only zipped .pth files are read")
    if llama2c.looks_like(start, path.stat().st_size):
        return "llama2c"
    raise ClockhandError(f"{path} is no model that clockhand knows: Hugging Face folders, GGUF, llama2.c, MiniMind")


def read(source: Path, tokenizer: Path | None = None) -> Found:
    """The model in `source` and its tokenizer: the one inside, or the one at `tokenizer` if that is given.

    `tokenizer` is a tokenizer.json, a folder with one, or a tokenizer.bin of llama2.c.
    """
    format = recognize(source)
    words: Tokenizer | None = None
    if format == "hf":
        source = hf.find_model_folder(source)
        _refuse_packed(source)
        model = hf.load_model(source)
        words = Tokenizer.load(source) if (source / "tokenizer.json").is_file() else None
    elif format == "gguf":
        model, words = gguf.read(source)
    elif format == "llama2c":
        model = llama2c.read(source)
    else:
        model = minimind.read(source)
    if tokenizer is not None:
        words = _tokenizer(tokenizer, model.config.vocab_size)
    return Found(format, model, words)


def import_model(
    source: str | Path, out: str | Path, tokenizer: str | Path | None = None, inference_rope_scaling: bool = False
) -> Imported:
    """Makes the model folder `out` from `source`, whose format is told by its content.

    `tokenizer` is a tokenizer.json, a folder with one, or a tokenizer.bin of llama2.c. `inference_rope_scaling` is
    MiniMind's switch: YaRN by 16 from 2048 positions. Raises `ClockhandError`, and then nothing is written.
    """
    found = read(Path(source), Path(tokenizer) if tokenizer else None)
    if inference_rope_scaling and found.format != "minimind":
        raise ClockhandError(
            f"--inference-rope-scaling is MiniMind's switch, but '{source}' is of the format {found.format}"
        )
    model = minimind.with_inference_rope_scaling(found.model) if inference_rope_scaling else found.model
    files = hf.find_model_folder(source) if found.format == "hf" and found.tokenizer and tokenizer is None else None
    card = f"Imported by clockhand from {Path(source).name}, a model in the format {found.format}."
    if files:
        hf.save_model(model, out, tokenizer_files_from=files, card=card)
    else:
        hf.save_model(model, out, found.tokenizer, card=card)
    notes = [] if found.tokenizer else ["there is no tokenizer in it: give one with --tokenizer to generate text"]
    return Imported(found.format, Path(out), sum(each.numel() for each in model.parameters()), notes)


def export_model(model: str | Path, format: str, out: str | Path, dtype: str | None = None) -> Exported:
    """Writes the model folder (or run folder) `model` as `format` (hf, gguf or llama2c) to `out`.

    `dtype` is f32, f16, bf16 or q8_0 where the format has it; None is the model's own. `out` is a folder for hf and a
    file for the others. Raises `ClockhandError` naming the field when the format cannot hold the model.
    """
    if format not in EXPORTS:
        raise unknown_name("format", format, EXPORTS, "--format")
    folder, path = hf.find_model_folder(model), Path(out)
    if format != "hf" and path.is_dir():
        raise ClockhandError(f"'{path}' is a folder, but {format} is one file: name it in --out")
    _refuse_packed(folder)
    loaded = hf.load_model(folder)
    words = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    if dtype is None:
        own = loaded.dtype
        dtype = next(name for name, each in TORCH_DTYPES.items() if each == own)
    if format == "gguf":
        notes = gguf.write(loaded, words, path, dtype, name=path.stem)
    elif format == "llama2c":
        notes = _export_llama2c(loaded, words, path, dtype)
    else:
        notes = _export_hf(loaded, folder, words is not None, path, dtype)
    return Exported(format, path, notes)


def _refuse_packed(folder: Path) -> None:
    precision = hf.stored_precision(folder)
    if precision is not None:
        raise ClockhandError(
            f"'{folder}' cannot be exported: its weights are packed as {precision}, which only clockhand reads"
        )


@dataclass(frozen=True)
class Quantized:
    """What `quantize_model` did."""

    folder: Path
    bytes: int
    """Of the weights in it."""
    bytes_before: int


def quantize_model(model: str | Path, precision: str, out: str | Path) -> Quantized:
    """Makes the model folder `out` of the model or run folder `model`, its weights packed as int8 or int4.

    Raises `ClockhandError` for another precision, for widths that int4's groups do not divide, and for a model that is
    packed already.
    """
    if precision not in hf.STORED_PRECISIONS:
        hint = "; --format hf --dtype bf16 of 'clockhand export' halves a model" if precision == "bf16" else ""
        raise ClockhandError(f"--precision {precision} must be {' or '.join(hf.STORED_PRECISIONS)}{hint}")
    folder = hf.find_model_folder(model)
    if (own := hf.stored_precision(folder)) is not None:
        raise ClockhandError(f"'{folder}' is packed as {own} already: quantize the model that it was made of")
    tokenizer = folder if (folder / "tokenizer.json").is_file() else None
    card = f"Packed as {precision} by clockhand from {folder.name}."
    hf.save_model(packed(hf.load_model(folder), precision), out, tokenizer_files_from=tokenizer, card=card)
    return Quantized(Path(out), _weight_bytes(Path(out)), _weight_bytes(folder))


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


def _export_llama2c(model: Transformer, tokenizer: Tokenizer | None, path: Path, dtype: str) -> list[str]:
    versions = {"f32": 0, "f16": 0, "bf16": 0, "q8_0": 2}
    if dtype not in versions:
        raise unknown_name("dtype", dtype, ("f32", "q8_0"), "--dtype")
    return llama2c.write(model, tokenizer, path, versions[dtype])


def _export_hf(model: Transformer, folder: Path, has_tokenizer: bool, path: Path, dtype: str) -> list[str]:
    obstacle = names.export_obstacle(model.config)
    if obstacle:
        raise ClockhandError(f"cannot be exported: {obstacle}")
    if dtype not in TORCH_DTYPES:
        raise unknown_name("dtype", dtype, TORCH_DTYPES, "--dtype")
    hf.save_model(model, path, tokenizer_files_from=folder if has_tokenizer else None, dtype=TORCH_DTYPES[dtype])
    return []


def _tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    if path.is_dir():
        tokenizer = Tokenizer.load(path)
    elif not path.is_file():
        raise ClockhandError(f"no tokenizer at '{path}'")
    else:
        with open(path, "rb") as file:
            is_json = file.read(64).lstrip()[:1] == b"{"
        tokenizer = Tokenizer.load(path) if is_json else llama2c.read_tokenizer(path, vocab_size)
    if tokenizer.vocab_size > vocab_size:
        raise ClockhandError(f"'{path}' has {tokenizer.vocab_size} ids, but the model only {vocab_size}")
    return tokenizer
