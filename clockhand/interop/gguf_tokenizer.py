"""Tokenizers inside GGUF: `to_keys` says ours in its keys, `from_keys` reads them.

    gpt2    byte-level BPE. The pattern that splits text first is only *named* there (`PRE_TOKENIZERS`), and llama.cpp
            has it built in: with the wrong name everything runs, and every text gets other ids.
    llama   pieces with scores (`sentencepiece.py`).

What the two programs would split differently is refused.
"""

import json
from collections.abc import Mapping
from typing import Any

from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.interop import sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""What GGUF calls the types of tokens."""

_NO_MERGE = "▁ ▁"
"""The package cannot write an empty list. No merge begins with this, since no byte is written so."""


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def _split_by(digits: str) -> dict[str, Any]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _byte_level(use_regex=True),  # ours, and MiniMind's
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    },
    "qwen2": _split_by(r"\p{N}"),
    "llama-bpe": _split_by(r"\p{N}{1,3}"),
}
"""llama.cpp's name for how text is split first, and how tokenizer.json says the same."""

_WHOLE_WORDS_FIRST = "llama-bpe"
"""The pre-tokenizer with which llama.cpp takes a word that is a token as it is (`ignore_merges`)."""


def to_keys(tokenizer: Tokenizer, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """The keys of `tokenizer.ggml.*` for a model of `vocab_size` ids, and what the user should know.

    Raises `ClockhandError` for a tokenizer that llama.cpp would not repeat.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ClockhandError(f"the tokenizer has {tokenizer.vocab_size} ids, but the model only {vocab_size}")
    vocabulary = sentencepiece.from_tokenizer(tokenizer)
    keys, notes = _byte_level_keys(tokenizer) if vocabulary is None else (_piece_keys(vocabulary), [])
    tokens, types = _tokens(tokenizer, vocab_size)
    for name, id in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id), ("padding", tokenizer.pad_id)):
        if id is not None:
            keys[f"{name}_token_id"] = id
    keys |= {"tokens": tokens, "token_type": types, "add_bos_token": _starts_with_bos(tokenizer)}
    if vocabulary is not None:
        keys["scores"] += [0.0] * (vocab_size - len(keys["scores"]))
    keys = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    if tokenizer.chat_template:
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    return keys, notes


def from_keys(keys: Mapping[str, Any], source: object) -> Tokenizer:
    """The tokenizer that the keys of a GGUF file describe. Raises `ClockhandError` naming `source`."""
    said = {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items() if "tokenizer." in name}
    tokens = _list(said, "tokens", str, source)
    types = _list(said, "token_type", int, source) if "token_type" in said else [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ClockhandError(f"{source}: {len(tokens)} tokens but {len(types)} types")
    while types and types[-1] == UNUSED:  # rows of the embedding that no text uses
        tokens, types = tokens[:-1], types[:-1]
    roles = {}
    for name, role in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        id = said.get(f"{name}_token_id")
        if id is not None:
            if not isinstance(id, int) or not 0 <= id < len(tokens):
                raise ClockhandError(f"{source}: {name}_token_id = {id!r} must be one of {len(tokens)} ids")
            roles[role] = tokens[id]
    if said.get("model") == "llama":
        tokenizer = _from_pieces(said, tokens, types, roles, source)
    elif said.get("model") == "gpt2":
        tokenizer = _from_byte_level(said, tokens, types, roles, source)
    else:
        raise ClockhandError(f"{source}: a tokenizer of kind {said.get('model')!r} is not gpt2 or llama")
    template = said.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.config["chat_template"] = template
    return tokenizer


# ---- ours in its keys ----


def _byte_level_keys(tokenizer: Tokenizer) -> tuple[dict[str, Any], list[str]]:
    spec, model, notes = tokenizer.spec, tokenizer.spec["model"], []
    if model["type"] != "BPE" or (spec["decoder"] or {}).get("type") != "ByteLevel":
        raise ClockhandError(f"a tokenizer of kind {tokenizer.kind} has no counterpart in llama.cpp that we know")
    if spec["normalizer"] == {"type": "NFC"}:
        notes.append("llama.cpp does not normalize: text that is not in Unicode's NFC gets other ids there")
    elif spec["normalizer"] is not None:
        kind = spec["normalizer"]["type"]
        raise ClockhandError(f"the tokenizer changes text before it splits it ({kind}), which llama.cpp does not")
    split = _without_offsets(spec["pre_tokenizer"])
    name = next((name for name, known in PRE_TOKENIZERS.items() if known == split), None)
    if name is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ClockhandError(f"the tokenizer splits text in a way that llama.cpp has no name for; known are {known}")
    if bool(model.get("ignore_merges")) != (name == _WHOLE_WORDS_FIRST):
        raise ClockhandError(f"ignore_merges = {model.get('ignore_merges')} is not what llama.cpp does for {name}")
    merges = [f"{left} {right}" for left, right in model["merges"]]
    return {"model": "gpt2", "pre": name, "merges": merges or [_NO_MERGE]}, notes


def _piece_keys(vocabulary: sentencepiece.Pieces) -> dict[str, Any]:
    return {"model": "llama", "scores": list(vocabulary.scores), "add_space_prefix": True}


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    """What every id of the model spells, and its type."""
    tokens, types = [f"[unused {id}]" for id in range(vocab_size)], [UNUSED] * vocab_size
    pieces = tokenizer.spec["model"].get("byte_fallback", False)
    for token, id in tokenizer.spec["model"]["vocab"].items():
        tokens[id], types[id] = token, BYTE if pieces and sentencepiece.is_byte(token) else NORMAL
    for added in tokenizer.spec["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    unk = tokenizer.spec["model"].get("unk_token")
    if pieces and unk is not None:
        types[tokens.index(unk)] = UNKNOWN
    return tokens, types


def _starts_with_bos(tokenizer: Tokenizer) -> bool:
    """Whether others, asked for special tokens, put bos first."""
    from tokenizers import Tokenizer as Backend

    added = Backend.from_str(json.dumps(tokenizer.spec)).encode("").ids
    if added not in ([], [tokenizer.bos_id]):
        raise ClockhandError(f"the tokenizer puts ids {added} around a text; llama.cpp can only put bos before it")
    return bool(added)


def _without_offsets(spec: Any) -> Any:
    """A pre-tokenizer without what only says where in the text a token was."""
    if isinstance(spec, dict):
        return {key: _without_offsets(value) for key, value in spec.items() if key != "trim_offsets"}
    return [_without_offsets(each) for each in spec] if isinstance(spec, list) else spec


# ---- its keys as ours ----


def _list(said: Mapping[str, Any], name: str, kind: type, source: object) -> list[Any]:
    values = said.get(name)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ClockhandError(f"{source}: tokenizer.ggml.{name} must be a list of {kind.__name__}")
    return values


def _from_pieces(
    said: Mapping[str, Any], tokens: list[str], types: list[int], roles: dict[str, str], source: object
) -> Tokenizer:
    scores = _list(said, "scores", float, source)[: len(tokens)]
    if not said.get("add_space_prefix", True):
        raise ClockhandError(f"{source}: add_space_prefix = False is not supported for tokenizers with scores")
    special = [token for token, type in zip(tokens, types) if type in (UNKNOWN, CONTROL)]
    unk = next((token for token, type in zip(tokens, types) if type == UNKNOWN), None)
    bos, eos = roles.get("bos_token"), roles.get("eos_token")
    if unk is None or bos is None or eos is None or len(scores) != len(tokens):
        raise ClockhandError(f"{source}: its tokenizer must have a score for each token, and name unk, bos and eos")
    if USER_DEFINED in types:
        raise ClockhandError(f"{source}: user-defined tokens in a tokenizer with scores are not supported")
    return sentencepiece.to_tokenizer(sentencepiece.Pieces(tokens, scores), special, unk, bos, eos, source)


def _from_byte_level(
    said: Mapping[str, Any], tokens: list[str], types: list[int], roles: dict[str, str], source: object
) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    name = said.get("pre")
    if name not in PRE_TOKENIZERS:
        raise ClockhandError(f"{source}: pre-tokenizer {name!r} must be one of {', '.join(PRE_TOKENIZERS)}")
    merges = [merge.split(" ") for merge in _list(said, "merges", str, source) if merge != _NO_MERGE]
    added = [
        {**sentencepiece.added_token(id, token), "special": type == CONTROL}
        for id, (token, type) in enumerate(zip(tokens, types))
        if type in (CONTROL, USER_DEFINED)
    ]
    bos = roles.get("bos_token")
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": with_offsets(PRE_TOKENIZERS[name]),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name == _WHOLE_WORDS_FIRST,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    if said.get("add_bos_token", name == _WHOLE_WORDS_FIRST) and bos is not None:
        spec["post_processor"] = sentencepiece.starts_with(bos, tokens.index(bos))
    if len(spec["model"]["vocab"]) != len(tokens):
        raise ClockhandError(f"{source}: a token is there twice")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, "clean_up_tokenization_spaces": False}
    try:
        return Tokenizer(Backend.from_str(json.dumps(spec)), config)
    except Exception as error:  # the library raises plain Exception for merges and tokens that do not fit
        raise ClockhandError(f"{source}: its tokenizer is not sound: {error}") from None


def with_offsets(spec: Any) -> Any:
    if isinstance(spec, dict):
        more = {"trim_offsets": True} if spec.get("type") == "ByteLevel" else {}
        return {**{key: with_offsets(value) for key, value in spec.items()}, **more}
    return [with_offsets(each) for each in spec] if isinstance(spec, list) else spec
