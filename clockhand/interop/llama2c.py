"""llama2.c's .bin files: seven numbers, then the weights in a fixed order, nothing named.

    version 0   header of 28 bytes, fp32; a negative vocabulary says that the head is not tied    `run` reads it
    version 1   header of 256 bytes with a magic number, fp32
    version 2   the same header; int8 with one fp32 scale for each group, only norms in fp32      `runq` reads it

The header has no room for more than sizes, so everything else is taken for granted (`ALWAYS`), and a model that is
otherwise is refused by the field's name. RoPE pairs adjacent dimensions there; `read` and `write` move the rows of q
and k, so that our side has the `half` layout of everything else.

Its tokenizer.bin is pieces with scores: `read_tokenizer` and `write_tokenizer`.
"""

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.disk import new_file
from clockhand.errors import ClockhandError
from clockhand.interop import sentencepiece
from clockhand.interop.exchange import assemble, refuse_countless, refuse_others
from clockhand.model.rope import half_to_interleaved, interleaved_to_half, rotation
from clockhand.model.transformer import Transformer

FORMAT = "llama2.c"
MAGIC = 0x616B3432  # "ak42"
VERSIONS = (0, 1, 2)
LONG_HEADER = 256

ALWAYS: dict[str, Any] = dict(
    norm="rms", norm_position="pre", norm_eps=1e-5, residual=True, qk_norm=False, attention_bias="none",
    sliding_window=0, mlp="swiglu", mlp_bias=False, n_experts=0, position="rope", rope_theta=1e4, rope_scaling="none",
)  # fmt: skip
"""What the program has built in."""

# Its own order. Every layer's tensor of one kind lies together: first this norm of all layers, then q_proj of all.
_NORMS = ("attention_norm", "mlp_norm")
_ATTENTION = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
_MLP = ("mlp.gate_proj", "mlp.down_proj", "mlp.up_proj")
_TABLES = "cos and sin"  # the rotation, which version 0 stores although it follows from the sizes

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
FIRST_BYTE = 3  # the program looks for byte b at id b + 3


class Header(NamedTuple):
    """What the file says of itself."""

    version: int
    config: ModelConfig
    group_size: int  # version 2: how many weights share a scale
    start: int  # where the weights begin, in bytes


def read(path: Path) -> Transformer:
    """The model of a .bin file, in fp32. Raises `ClockhandError` for a file that is not what its header says."""
    with open(path, "rb") as file:
        header = _read_header(file, path)
        size, needed = path.stat().st_size, header.start + _weight_bytes(header)
        if size != needed:
            raise ClockhandError(f"{path} has {size} bytes, but its header asks for {needed}")
        refuse_countless(header.config, path)
        places = _places(header)
        return assemble(header.config, lambda name: _read_weight(file, header, places[name], name), path)


def write(model: Transformer, tokenizer: Tokenizer | None, path: Path, version: int = 0) -> list[str]:
    """Writes the .bin file at `path`, and a tokenizer.bin beside it where the tokenizer can be one.

    Returns what the user should know. Raises `ClockhandError` for a model that the format cannot hold.
    """
    config = model.config
    if config.n_heads * config.head_dim != config.d_model:
        raise ClockhandError(
            f"head_dim = {config.head_dim}, but {FORMAT} has only n_heads = {config.n_heads} heads that make up "
            f"d_model = {config.d_model} together"
        )
    refuse_others(config, {**ALWAYS, "head_dim": config.d_model // config.n_heads}, FORMAT)
    pieces = sentencepiece.from_tokenizer(tokenizer) if tokenizer else None
    header = Header(version, config, _group_size(config), _header_size(version))
    with new_file(path) as beside, open(beside, "wb") as file:
        file.write(_pack_header(header))
        _write_weights(file, header, model)
    if pieces is None or not _has_places(pieces):
        return ["no tokenizer.bin: llama2.c splits text by scores, with <unk>, <s>, </s> and the bytes as first ids"]
    write_tokenizer(pieces, path.with_name("tokenizer.bin"))
    return []


def looks_like(start: bytes, size: int) -> bool:
    """Whether a file of `size` bytes that begins with `start` is one of these."""
    if len(start) < 28:
        return False
    if struct.unpack_from("<I", start)[0] == MAGIC:
        return True
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack_from("<7i", start)
    if min(dim, hidden, layers, heads, kv_heads, length) < 1 or vocab == 0 or dim % heads or heads % kv_heads:
        return False
    return layers * dim * (2 * dim + 3 * hidden) * 4 < size  # a part of what it asks for


# ---- header ----


def _read_header(file: BinaryIO, path: Path) -> Header:
    start = file.read(LONG_HEADER)
    if len(start) < 28:
        raise ClockhandError(f"{path} has {len(start)} bytes, too few for a header of llama2.c")
    magic, version = struct.unpack_from("<Ii", start)
    sizes, tied, group_size = struct.unpack_from("<7i", start), True, 0
    if magic != MAGIC:
        version = 0
        tied = sizes[5] > 0
    elif version not in VERSIONS[1:] or len(start) < LONG_HEADER:
        raise ClockhandError(f"{path} is of version {version} of llama2.c's format; known are 0, 1 and 2")
    else:
        *sizes, tied, group_size = struct.unpack_from("<7i?i", start, 8)  # type: ignore[assignment]
    dim, hidden, layers, heads, kv_heads, vocab, length = sizes
    try:
        config = ModelConfig(
            vocab_size=abs(vocab) if version == 0 else vocab, d_model=dim, n_layers=layers, n_heads=heads,
            n_kv_heads=kv_heads, d_ff=hidden, max_seq_len=length, tie_embeddings=tied, norm_eps=ALWAYS["norm_eps"],
            rope_theta=ALWAYS["rope_theta"],
        )  # fmt: skip
    except ClockhandError as error:
        raise ClockhandError(f"{path}: {error}") from None
    if kv_heads < 1:  # 0 would mean n_heads to us
        raise ClockhandError(f"{path}: n_kv_heads = {kv_heads} must be at least 1")
    # Every matrix has a side of d_model, so this divides them all; others do not occur.
    if version == 2 and (group_size < 1 or dim % group_size):
        raise ClockhandError(f"{path}: groups of {group_size} weights do not divide its width of {dim}")
    return Header(version, config, group_size, _header_size(version))


def _pack_header(header: Header) -> bytes:
    config = header.config
    vocab = config.vocab_size if config.tie_embeddings or header.version else -config.vocab_size
    sizes = (config.d_model, config.d_ff, config.n_layers, config.n_heads, config.n_kv_heads, vocab, config.max_seq_len)
    if header.version == 0:
        return struct.pack("<7i", *sizes)
    packed = struct.pack("<Ii7i?", MAGIC, header.version, *sizes, config.tie_embeddings)
    if header.version == 2:
        packed += struct.pack("<i", header.group_size)
    return packed.ljust(LONG_HEADER, b"\0")


def _header_size(version: int) -> int:
    return LONG_HEADER if version else 28


def _group_size(config: ModelConfig) -> int:
    """The largest power of two up to 64 that divides every row: `runq` quantizes activations in the same groups."""
    return math.gcd(64, config.d_model, config.d_ff)


# ---- weights ----


def _order(version: int, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors as they follow each other in the file; `_TABLES` for the tables of version 0."""
    c = config
    kv_width = c.n_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (c.d_model,),
        "mlp_norm": (c.d_model,),
        "attention.q_proj": (c.d_model, c.d_model),
        "attention.k_proj": (kv_width, c.d_model),
        "attention.v_proj": (kv_width, c.d_model),
        "attention.o_proj": (c.d_model, c.d_model),
        "mlp.gate_proj": (c.d_ff, c.d_model),
        "mlp.down_proj": (c.d_model, c.d_ff),
        "mlp.up_proj": (c.d_ff, c.d_model),
    }

    def of_all_layers(*kinds: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        return ((f"blocks.{n}.{kind}.weight", shapes[kind]) for kind in kinds for n in range(c.n_layers))

    embedding = ("token_embedding.weight", (c.vocab_size, c.d_model))
    final_norm = ("final_norm.weight", (c.d_model,))
    if version == 0:
        yield embedding
        yield from of_all_layers(_NORMS[0], *_ATTENTION, _NORMS[1], *_MLP)
        yield final_norm
        yield _TABLES, (2, c.max_seq_len, c.head_dim // 2)
    else:
        yield from of_all_layers(*_NORMS)
        yield final_norm
        yield embedding
        yield from of_all_layers(*_ATTENTION, *_MLP)
    if not c.tie_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.d_model)


def _bytes_each(header: Header, name: str) -> int:
    """How wide a number of this tensor is: version 2 has int8 for matrices."""
    return 1 if header.version == 2 and "norm" not in name else 4


def _weight_bytes(header: Header) -> int:
    """How long the weights are, by multiplication alone: the sizes may be absurd, and nothing is allocated yet."""
    c, kv_width = header.config, header.config.n_kv_heads * header.config.head_dim
    norms = (2 * c.n_layers + 1) * c.d_model
    layer = c.d_model * (2 * c.d_model + 2 * kv_width + 3 * c.d_ff)
    matrices = c.n_layers * layer + c.vocab_size * c.d_model * (1 if c.tie_embeddings else 2)
    if header.version == 2:
        return 4 * norms + matrices + 4 * (matrices // header.group_size)
    tables = c.max_seq_len * c.head_dim if header.version == 0 else 0
    return 4 * (norms + matrices + tables)


def _places(header: Header) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """For each name: the byte where it begins, its shape, and (version 2) the byte where its scales begin."""
    order = list(_order(header.version, header.config))
    at, places = header.start, {}
    # Version 2 keeps the scales of all matrices behind the last matrix.
    scales_at = header.start + sum(math.prod(shape) * _bytes_each(header, name) for name, shape in order)
    for name, shape in order:
        places[name] = at, shape, scales_at
        at += math.prod(shape) * _bytes_each(header, name)
        if _bytes_each(header, name) == 1:
            scales_at += 4 * (math.prod(shape) // header.group_size)
    return places


def _read_weight(file: BinaryIO, header: Header, place: tuple[int, tuple[int, ...], int], name: str) -> Tensor:
    at, shape, scales_at = place
    file.seek(at)
    if _bytes_each(header, name) == 1:
        groups = torch.from_numpy(np.fromfile(file, "<i1", math.prod(shape))).view(-1, header.group_size)
        file.seek(scales_at)
        scales = torch.from_numpy(np.fromfile(file, "<f4", len(groups)))
        weight = groups * scales[:, None]
    else:
        weight = torch.from_numpy(np.fromfile(file, "<f4", math.prod(shape)))
    return _moved(name, weight.view(shape), header.config, interleaved_to_half)


def _write_weights(file: BinaryIO, header: Header, model: Transformer) -> None:
    parameters, scales = dict(model.named_parameters()), []
    for name, shape in _order(header.version, header.config):
        if name == _TABLES:
            cos, sin = rotation(header.config, torch.arange(header.config.max_seq_len)[None])
            _write_floats(file, torch.stack((cos[0], sin[0])))
            continue
        weight = parameters[name].detach().float().cpu().reshape(shape)
        if header.config.rope_layout == "half":
            weight = _moved(name, weight, header.config, half_to_interleaved)
        if _bytes_each(header, name) == 1:
            groups = weight.reshape(-1, header.group_size)
            scale = groups.abs().amax(1) / 127
            quantized = (groups / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
            file.write(quantized.to(torch.int8).numpy().tobytes())
            scales.append(scale)
        else:
            _write_floats(file, weight)
    for scale in scales:
        _write_floats(file, scale)


def _write_floats(file: BinaryIO, values: Tensor) -> None:
    file.write(values.contiguous().numpy().astype("<f4", copy=False).tobytes())


def _moved(name: str, weight: Tensor, config: ModelConfig, move: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The weight with its rows in the other RoPE layout, where it has such rows."""
    return move(weight, config.head_dim) if ".q_proj." in name or ".k_proj." in name else weight


# ---- tokenizer.bin ----


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a tokenizer.bin that must hold `vocab_size` pieces.

    The program ends a text where the model writes <s> again, so that is the end token. Raises `ClockhandError`.
    """
    size, longest = path.stat().st_size, 8 + 4 * sentencepiece.LONGEST_PIECE
    if size > vocab_size * longest:
        raise ClockhandError(f"{path} has {size} bytes, more than {vocab_size} pieces can take")
    content = path.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    offset = 4  # after the length of the longest piece, which only the C program needs
    while offset < len(content):
        if len(content) - offset < 8:
            raise ClockhandError(f"{path} ends inside piece {len(pieces)}")
        score, length = struct.unpack_from("<fi", content, offset)
        offset += 8
        if not 0 <= length <= len(content) - offset:
            raise ClockhandError(f"{path}: piece {len(pieces)} claims {length} bytes, more than the file has left")
        try:
            piece = content[offset : offset + length].decode()
        except UnicodeDecodeError:
            raise ClockhandError(f"{path}: piece {len(pieces)} is not UTF-8") from None
        offset += length
        pieces.append(piece.replace(" ", sentencepiece.SPACE))
        scores.append(score)
    if len(pieces) != vocab_size:
        raise ClockhandError(f"{path} has {len(pieces)} pieces, but the model has a vocabulary of {vocab_size}")
    pieces[:FIRST_BYTE] = [piece.strip("\n") for piece in pieces[:FIRST_BYTE]]
    vocabulary = sentencepiece.Pieces(pieces, scores)
    if not _has_places(vocabulary):
        raise ClockhandError(f"{path} must begin with <unk>, <s>, </s> and the 256 bytes: llama2.c counts on it")
    return sentencepiece.to_tokenizer(vocabulary, [UNK, BOS, EOS], UNK, BOS, eos=BOS, source=path)


def write_tokenizer(vocabulary: sentencepiece.Pieces, path: Path) -> None:
    """Writes a tokenizer.bin."""
    texts = [piece.replace(sentencepiece.SPACE, " ") for piece in vocabulary.pieces]
    texts[1:FIRST_BYTE] = [f"\n{text}\n" for text in texts[1:FIRST_BYTE]]  # as llama2.c prints them
    records = [text.encode() for text in texts]
    with new_file(path) as beside, open(beside, "wb") as file:
        file.write(struct.pack("<i", max(map(len, records))))
        for score, record in zip(vocabulary.scores, records):
            file.write(struct.pack("<fi", score, len(record)) + record)


def _has_places(vocabulary: sentencepiece.Pieces) -> bool:
    """Whether the first ids are what the program has built in."""
    bytes_of_one = [f"<0x{byte:02X}>" for byte in range(256)]
    return vocabulary.pieces[: FIRST_BYTE + 256] == [UNK, BOS, EOS, *bytes_of_one]
