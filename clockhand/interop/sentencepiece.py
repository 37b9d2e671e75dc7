"""Tokenizers made of pieces with scores, as SentencePiece trains them and llama2.c and GGUF ("llama") store them.

    SentencePiece   join the neighbours whose union has the highest score, leftmost first, until none is a piece
    tokenizer.json  apply the merge with the lowest rank

Both are the same rule when the merges are all ways to cut a piece in two, ranked by the score of the whole. So pieces
with scores become a `Tokenizer`, and such a tokenizer becomes pieces with scores again. A space is written "▁" in a
piece, one is put before every text, and a character that is no piece becomes its bytes, "<0x0A>".
"""

import json
import math
import re
from typing import Any, NamedTuple

from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError

SPACE = "▁"
LONGEST_PIECE = 1000  # characters. Cutting a piece everywhere takes the square of this.
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Pieces(NamedTuple):
    """A vocabulary: what each id spells, with "▁" for a space, and its score."""

    pieces: list[str]
    scores: list[float]


def is_byte(piece: str) -> bool:
    """Whether the piece stands for one byte, as "<0x0A>" does."""
    return _BYTE.fullmatch(piece) is not None


def to_tokenizer(vocabulary: Pieces, special: list[str], unk: str, bos: str, eos: str, source: object) -> Tokenizer:
    """The tokenizer whose ids are the places in `vocabulary`. `special` are the pieces that stand for no text.

    Raises `ClockhandError` naming `source` for a vocabulary without all bytes, with a piece that is repeated or overly
    long, or with a score that is no number.
    """
    from tokenizers import Tokenizer as Backend

    pieces, scores = vocabulary
    _check(vocabulary, source)
    ids = {piece: id for id, piece in enumerate(pieces)}
    spec: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(ids[piece], piece) for piece in special],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": starts_with(bos, ids[bos]),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unk,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": _merges(pieces, scores, special),
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(Backend.from_str(json.dumps(spec)), config)


def from_tokenizer(tokenizer: Tokenizer) -> Pieces | None:
    """The pieces and scores that split every text as `tokenizer` does; None when it is not of this kind.

    Scores are 0, -1, -2, ... in the order of the merges, then on for the pieces that no merge makes.
    """
    spec = tokenizer.spec
    model = spec["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback") or spec["pre_tokenizer"] is not None:
        return None
    pieces = [""] * tokenizer.vocab_size
    for piece, id in model["vocab"].items():
        pieces[id] = piece
    special = [token["content"] for token in spec["added_tokens"]]
    made = dict.fromkeys(left + right for left, right in model["merges"])
    plain = [piece for piece in pieces if piece not in made and piece not in special and not is_byte(piece)]
    score = {piece: -float(place) for place, piece in enumerate([*made, *plain])}
    scores = [score.get(piece, 0.0) for piece in pieces]
    if "" in pieces or not _same_rule(_merges(pieces, scores, special), model["merges"]):
        return None
    return Pieces(pieces, scores)


def _merges(pieces: list[str], scores: list[float], special: list[str]) -> list[list[str]]:
    """All ways to cut a piece into two others, the highest score first."""
    usable = {piece for piece in pieces if piece not in special and not is_byte(piece)}
    cuts = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in zip(pieces, scores)
        if piece in usable
        for cut in range(1, len(piece))
        if piece[:cut] in usable and piece[cut:] in usable
    ]
    return [[left, right] for _, left, right in sorted(cuts, key=lambda cut: cut[0])]


def _same_rule(ours: list[list[str]], theirs: list[list[str]]) -> bool:
    """Whether two lists of merges hold the same cuts and rank their wholes alike."""

    def wholes(merges: list[list[str]]) -> list[str]:
        return ["".join(cut) for cut in merges]

    return wholes(ours) == wholes(theirs) and sorted(ours) == sorted([left, right] for left, right in theirs)


def _check(vocabulary: Pieces, source: object) -> None:
    pieces, scores = vocabulary
    seen: set[str] = set()
    for id, (piece, score) in enumerate(zip(pieces, scores)):
        if not piece or piece in seen:
            raise ClockhandError(f"{source}: piece {id} is {piece[:40]!r}, which is empty or there twice")
        if len(piece) > LONGEST_PIECE:
            raise ClockhandError(f"{source}: piece {id} has {len(piece)} characters, more than {LONGEST_PIECE}")
        if not math.isfinite(score):
            raise ClockhandError(f"{source}: piece {id} has score {score}, which must be a finite number")
        seen.add(piece)
    missing = next((byte for byte in range(256) if f"<0x{byte:02X}>" not in seen), None)
    if missing is not None:
        raise ClockhandError(f"{source}: there is no piece <0x{missing:02X}>, so some texts could not be encoded")


def added_token(id: int, content: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, **plain, "special": True}


def starts_with(bos: str, id: int) -> dict[str, Any]:
    """What others run when they ask for special tokens: bos before the text."""
    text = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": text,
        "pair": [*text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    }
