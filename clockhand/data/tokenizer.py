"""Text to ids and back, without loss.

All three kinds are one thing, byte-level BPE, and differ only in which merges they have:

    byte   no merges: an id is a special token or one byte
    char   only merges that build one character of the corpus out of its UTF-8 bytes
    bpe    merges learned from the corpus

Since the 256 bytes are always there, every string can be written, and since text is first split by GPT-2's pattern
and never normalised, `decode(encode(x)) == x`. Being one thing they are also one format: tokenizer.json and
tokenizer_config.json as Hugging Face's AutoTokenizer and llama.cpp's "gpt-2" pre-tokenizer read them.

    ids 0..4     the special tokens, in the order of SPECIAL_TOKENS
    ids 5..260   the bytes 0..255
    ids 261..    the merges, in the order in which they apply

Tokenizers of other projects load as well. How a conversation becomes text is in `chat.py`.
"""

import codecs
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clockhand.data.chat import CHATML
from clockhand.disk import write_text
from clockhand.errors import ClockhandError, unknown_name

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

BOS, EOS, PAD, IM_START, IM_END = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, PAD, IM_START, IM_END)
KINDS = ("bpe", "char", "byte")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
DEFAULT_VOCAB_SIZE = 4096
MAX_VOCAB_SIZE = 2**20  # several times any in use; the trainer reserves memory for all of it, and aborts when it cannot

# Where a long text may be cut, and about how long the pieces become.
LINE_END = re.compile(r"(?<=[\w.,;:!?])\n")
PIECE_CHARACTERS = 2**16

Merges = list[tuple[str, str]]


def _byte_letters() -> list[str]:
    """The printable character that stands for each byte in a vocabulary: GPT-2's table.

    Visible Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()
LETTER_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


class Tokenizer:
    """Ids for text, and text for ids. Made by `train` or `load`."""

    def __init__(self, backend: "tokenizers.Tokenizer", config: dict[str, Any]) -> None:
        """`config` is the content of tokenizer_config.json: who is bos, eos and pad, and the chat template."""
        self.config = config
        # With this, text that spells a special token is plain text; such ids come from bos=, eos= and encode_control.
        backend.encode_special_tokens = True
        self._backend = backend
        self.spec: dict[str, Any] = json.loads(backend.to_str())
        """The content of tokenizer.json."""
        self.bos_id = self._named("bos_token")
        self.eos_id = self._named("eos_token")
        self.pad_id = self._named("pad_token")

    @classmethod
    def train(cls, texts: Iterable[str], kind: str = "bpe", vocab_size: int | None = None) -> "Tokenizer":
        """A tokenizer for text like `texts`, the same one for the same texts.

        `vocab_size` counts special tokens and bytes too. For bpe it is the size (default 4096; fewer when the text has
        no more pairs to merge). For char it is a limit, which keeps the commonest characters (default: all). A byte
        vocabulary has one possible size. Raises `ClockhandError` for a size that cannot be.
        """
        if kind not in KINDS:
            raise unknown_name("tokenizer kind", kind, KINDS)
        if vocab_size is not None and vocab_size < MIN_VOCAB_SIZE:
            needs = f"{MIN_VOCAB_SIZE}, for {len(SPECIAL_TOKENS)} special tokens and 256 bytes"
            raise ClockhandError(f"vocab_size = {vocab_size} must be at least {needs}")
        if vocab_size is not None and vocab_size > MAX_VOCAB_SIZE:
            raise ClockhandError(f"vocab_size = {vocab_size} must be at most {MAX_VOCAB_SIZE}")
        if kind == "byte" and vocab_size not in (None, MIN_VOCAB_SIZE):
            raise ClockhandError(f"vocab_size = {vocab_size} must be {MIN_VOCAB_SIZE} or left out for a byte tokenizer")
        if kind == "bpe":
            merges = _learned_merges(texts, (vocab_size or DEFAULT_VOCAB_SIZE) - MIN_VOCAB_SIZE)
        elif kind == "char":
            merges = _character_merges(texts, None if vocab_size is None else vocab_size - MIN_VOCAB_SIZE)
        else:
            merges = []
        return cls(_byte_level_bpe(merges), _own_config())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a folder with tokenizer.json, or from that file; tokenizer_config.json is read from beside it."""
        from tokenizers import Tokenizer as Backend

        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ClockhandError(f"no tokenizer at '{path}': {file} does not exist")
        try:
            backend = Backend.from_str(file.read_text("utf-8"))
        except Exception as error:  # the library raises plain Exception for anything it cannot read
            raise ClockhandError(f"{file} is not a readable tokenizer.json: {error}") from None
        backend.no_truncation()  # some files carry a length at which text is cut
        backend.no_padding()
        tokenizer = cls(backend, _read_config(file.parent))
        if tokenizer._decoder not in _DECODERS:
            raise ClockhandError(f"{file}: decoder {tokenizer._decoder} must be one of {', '.join(_DECODERS)}")
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, each beside its place first and then moved into it.

        Raises `ClockhandError` when the disk refuses; a folder that was made for them is gone again then.
        """
        folder = Path(folder)
        is_new = not folder.exists()
        try:
            write_text(folder / "tokenizer.json", self._backend.to_str(pretty=True))
            write_text(folder / "tokenizer_config.json", json.dumps(self.config, indent=2, ensure_ascii=False))
        except ClockhandError:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """The ids of `text`, never a special one. `bos` adds that token where the tokenizer puts it before text
        (`puts_bos`), `eos` its own where it has one."""
        return self.encode_batch([text], bos, eos)[0]

    def encode_batch(self, texts: Sequence[str], bos: bool = False, eos: bool = False) -> list[list[int]]:
        """`encode` for many texts at once, on all cores."""
        before = [self.bos_id] if bos and self.bos_id is not None and self.puts_bos else []
        after = [self.eos_id] if eos and self.eos_id is not None else []
        pieces = [self._pieces_of(text) for text in texts]
        try:
            encodings = self._backend.encode_batch_fast(list(chain(*pieces)), add_special_tokens=False)
        except TypeError:  # what the library says to a lone surrogate
            for text in texts:
                _refuse_surrogates(text)
            raise
        ids = (encoding.ids for encoding in encodings)
        return [before + list(chain(*islice(ids, len(each)))) + after for each in pieces]

    def encode_control(self, text: str, mark: str = "") -> list[int]:
        """Like `encode`, but a spelled-out special token becomes its id. For templates only, never for user text.

        `mark` is a character to leave out of the text between those tokens (`chat.py` says why).
        """
        # Longest first, so that a token which begins with another one is found whole.
        spellings = sorted(self.special_tokens, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, spellings))})", text) if spellings else [text]
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:  # splitting by a group puts what it matched at the odd places
                ids.append(self.special_tokens[piece])
            else:
                ids += self.encode(piece.replace(mark, "") if mark else piece)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. Raises `ClockhandError` for an unknown id."""
        stream = StreamDecoder(self, skip_special)
        return stream.push(*ids) + stream.flush()

    def piece(self, id: int) -> bytes:
        """The bytes that one id stands for (a special token: its spelling). Raises `ClockhandError` if unknown."""
        if not 0 <= id < self.vocab_size:
            raise ClockhandError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return self._pieces[id]

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Spelling and id of every control token."""
        return {token["content"]: token["id"] for token in self.spec["added_tokens"] if token["special"]}

    @cached_property
    def puts_bos(self) -> bool:
        """Whether text begins with the bos token, as its `post_processor` or its `add_bos_token` says.

        Many only name one (GPT-2, SmolLM2): their models have never seen it before a text.
        """
        if self.bos_id is None:
            return False
        first = self._backend.encode("", add_special_tokens=True).ids[:1]
        return first == [self.bos_id] or self.config.get("add_bos_token") is True

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which stand for no text."""
        named = {self.bos_id, self.eos_id, self.pad_id} - {None}
        return frozenset(self.special_tokens.values()) | named  # type: ignore[operator]

    @cached_property
    def kind(self) -> str:
        """byte | char | bpe for byte-level BPE, told from the merges; the model's own name for anything else.

        A char tokenizer whose characters all take one byte, as those of English do, is a byte tokenizer.
        """
        model = self.spec["model"]
        if model["type"] != "BPE" or self._decoder != "ByteLevel":
            return str(model["type"]).lower()
        if not model["merges"]:
            return "byte"
        merged = [_byte_level_piece(left + right) for left, right in model["merges"]]
        # Only bytes 10xxxxxx continue a character.
        within_characters = all(byte & 0xC0 == 0x80 for piece in merged for byte in piece[1:])
        return "char" if within_characters else "bpe"

    @cached_property
    def token_bytes(self) -> "np.ndarray":
        """(V,) int64: bytes of text that each id stands for, 0 for a special one. What bits per byte divide by."""
        import numpy as np

        return np.array([0 if id in self.special_ids else len(piece) for id, piece in enumerate(self._pieces)])

    @property
    def chat_template(self) -> str | None:
        """The jinja2 text of the template, see `chat.py`; None when there is none."""
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = next((each.get("template") for each in template if each.get("name") == "default"), None)
        return template

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides which ids a document gets."""
        decisive: list[Any] = [self.spec, self.bos_id, self.eos_id]
        if self.bos_id is not None and not self.puts_bos:
            decisive.append("bos is not put")
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def _pieces_of(self, text: str) -> list[str]:
        """Long text in pieces whose ids are those of the whole, so that all cores work on one text."""
        if len(text) <= PIECE_CHARACTERS or not self._splits_before_line_ends:
            return [text]
        pieces, start = [], 0
        while line_end := LINE_END.search(text, start + PIECE_CHARACTERS):
            pieces.append(text[start : line_end.start()])
            start = line_end.start()
        return [*pieces, text[start:]]

    @cached_property
    def _splits_before_line_ends(self) -> bool:
        """Whether it is ours or like ours: GPT-2's pattern joins no letter to a line end, and nobody else does."""
        ours = _byte_level_bpe([])
        same = (
            self.spec["normalizer"] is None and self.spec["pre_tokenizer"] == json.loads(ours.to_str())["pre_tokenizer"]
        )
        return same and all(token["special"] for token in self.spec["added_tokens"])

    def _named(self, role: str) -> int | None:
        token = self.config.get(role)
        if isinstance(token, dict):  # an AddedToken written out
            token = token.get("content")
        return None if token is None else self._backend.token_to_id(token)

    @cached_property
    def _decoder(self) -> str:
        decoder = self.spec["decoder"] or {"type": "none"}
        if decoder["type"] != "Sequence":
            return str(decoder["type"])
        return "+".join(part["type"] for part in decoder["decoders"])

    @cached_property
    def _pieces(self) -> list[bytes]:
        """The bytes of each id. An id that nobody has stands for none."""
        to_bytes = _DECODERS[self._decoder]
        pieces = [b""] * self.vocab_size
        for token, id in self._backend.get_vocab(with_added_tokens=True).items():
            pieces[id] = to_bytes(token)
        return pieces

    @property
    def _strips_first_space(self) -> bool:
        """SentencePiece puts a space before every text; its decoder takes it off again."""
        return self._decoder == _SENTENCEPIECE


class StreamDecoder:
    """Text as it is generated: `push` ids, get whole characters. All pushes and the flush together are `decode`.

    The work of a push does not grow with the text before it. `continues` says that the ids go on after other text, so
    that a space before the first word belongs to the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer._strips_first_space and not continues

    def push(self, *ids: int) -> str:
        """The characters that are complete with these ids: possibly none."""
        whole = (int(id) for id in ids)  # a torch scalar would not be found in a set
        return self._text(b"".join(self._tokenizer.piece(id) for id in whole if id not in self._skip))

    def flush(self) -> str:
        """U+FFFD for a character that was begun and never finished, otherwise nothing."""
        return self._text(b"", final=True)

    def _text(self, piece: bytes, final: bool = False) -> str:
        text = self._utf8.decode(piece, final)
        if text and self._strip_space:
            text, self._strip_space = text.removeprefix(" "), False
        return text


def _byte_level_piece(token: str) -> bytes:
    """The bytes a vocabulary entry is written for; added tokens with other characters stand for themselves."""
    letters = [LETTER_BYTES.get(letter) for letter in token]
    if None in letters:
        return token.encode()
    return bytes(byte for byte in letters if byte is not None)


def _sentencepiece_piece(token: str) -> bytes:
    """A "▁" is a space and "<0x0A>" the byte 10."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


_SENTENCEPIECE = "Replace+ByteFallback+Fuse+Strip"  # the decoder of Llama 2's tokenizer.json and its kin
_DECODERS = {"ByteLevel": _byte_level_piece, _SENTENCEPIECE: _sentencepiece_piece}


def _learned_merges(texts: Iterable[str], limit: int) -> Merges:
    """The merges BPE learns from `texts`, at most `limit`."""
    from tokenizers import trainers

    learner = _byte_level_bpe([])
    trainer = trainers.BpeTrainer(
        vocab_size=256 + limit, initial_alphabet=BYTE_LETTERS, special_tokens=[], show_progress=False
    )
    learner.train_from_iterator((_refuse_surrogates(text) for text in texts), trainer)
    return [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]


def _character_merges(texts: Iterable[str], limit: int | None) -> Merges:
    """Merges that build the characters of `texts` from their bytes, the commonest first, at most `limit`.

    A character of n bytes takes n-1 merges, some shared with its neighbours. Each starts with a character's first byte,
    so none can ever join two characters.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_refuse_surrogates(text))
    merges: dict[tuple[str, str], None] = {}  # a set that remembers its order
    for character in sorted(counts, key=lambda character: (-counts[character], character)):
        letters = "".join(BYTE_LETTERS[byte] for byte in character.encode())
        steps = [(letters[:end], letters[end]) for end in range(1, len(letters))]
        missing = [step for step in steps if step not in merges]
        if limit is None or len(merges) + len(missing) <= limit:
            merges.update(dict.fromkeys(missing))
    return list(merges)


def _byte_level_bpe(merges: Merges) -> "tokenizers.Tokenizer":
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    vocab: dict[str, int] = {}
    for token in [*SPECIAL_TOKENS, *BYTE_LETTERS, *(left + right for left, right in merges)]:
        vocab.setdefault(token, len(vocab))  # two merges may end in the same token
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(  # where others ask for special tokens, they get bos
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocab[BOS])]
    )
    return backend


def _own_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [IM_START, IM_END],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the template from chat_template.jinja when that is where it lives; {} if absent."""
    file, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: Any = {}
    if file.is_file():
        try:
            config = json.loads(file.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ClockhandError(f"{file} is not readable JSON: {error}") from None
        if not isinstance(config, dict):
            raise ClockhandError(f"{file} must hold a JSON object, not {type(config).__name__}")
    if template.is_file():
        config["chat_template"] = template.read_text("utf-8")
    return config


def _refuse_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ClockhandError(f"character {error.start} of the text is U+{code:04X}, half a character") from None
    return text
