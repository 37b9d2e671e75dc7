"""One text at the speed of the memory: a prompt by matrix products, then token after token by one compiled graph.

    decoder = Decoder(model, "int8")
    logits = decoder.read(prompt)          the prompt, in chunks
    logits = decoder.step(id)              one token, at the bandwidth of the memory

`weights.py` has the weights, `block.py` the arithmetic of both ways, `step.py` one token and `prompt.py` many; here is
the text: its cache, how far it has come, and the choice of the way. `generate`, the plain way, is what this equals.
Many texts at once are the engine's work, how a token is drawn is in `sampling.py`.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clockhand.allocator import keep_freed_memory, use_large_pages
from clockhand.count import total_parameters
from clockhand.errors import ClockhandError
from clockhand.infer.block import block, dense, embed, hidden_norm
from clockhand.infer.chunk import ChunkGraphs, can_be_ordered, is_chunk_compiled, ordered, seen_by_block
from clockhand.infer.graphs import Run, compiler
from clockhand.infer.prompt import WithMany, WithManyFused, attend_many, recall, recall_places, remember_many
from clockhand.infer.reach import check_ids, checked_reach
from clockhand.infer.step import PLACES, UNSEEN, Step, cache_shapes, compiled, is_compiled, is_worth_compiling, remember
from clockhand.infer.weights import head_of, kept_for, weights_of
from clockhand.model.cache import SLACK
from clockhand.model.moe import route
from clockhand.model.packed import check_precision, precision_of, unpack
from clockhand.model.rope import rotation
from clockhand.model.transformer import Transformer

SCRATCH = 2**26
"""Bytes of freed memory that the process keeps: what a chunk of a prompt needs, and soon needs again."""
CHUNK = 512
"""Tokens of a prompt read at once: enough for matrix products near their peak, and no more memory for longer ones."""


@dataclass(frozen=True)
class DecoderInfo:
    """What a decoder is made of."""

    precision: str
    weight_bytes: int
    """Read once a token."""
    compile_seconds: float
    """0 where the step was loaded."""


class Decoder:
    """One text on its way through a model: its cache, and the two ways to go on. Not for two threads at once."""

    def __init__(
        self,
        model: Transformer,
        precision: str | None = None,
        reach: int | None = None,
        compile: bool = True,
        exact: bool = False,
        compile_prompt: bool | None = None,
    ) -> None:
        """Copies the weights of `model` in `precision` (default: its own), unless they are kept (`keep_weights`).

        `reach` (default: the model's max_seq_len) is the most tokens the text may have, and what `dynamic` RoPE scaling
        adapts to. Without `compile` the step runs as it is written, slowly. Below fp32 the prompt is read and the cache
        kept in bf16; `exact` leaves both in fp32, as the plain model has them.

        `compile_prompt`: whether prompts are read by compiled graphs; None: with `compile`, if they are in the cache
        folder already or the step must be compiled too. Experts are not. The first long prompt they read makes a second
        copy of matrices that are not packed.

        Raises `ClockhandError` for a precision or a reach that the model cannot have, and where a step must be compiled
        and there is no C++ compiler.
        """
        keep_freed_memory(SCRATCH)
        own = precision_of(model)
        precision = own if precision is None else precision
        check_precision(precision)
        if own not in ("fp32", precision):
            raise ClockhandError(f"the weights are {own} already and cannot become {precision}")
        self.config, self.precision = model.config, precision
        config = model.config
        self.reach = checked_reach(config, reach)
        self.length = 0
        """Tokens held."""
        self._written = 0  # the most that were ever held: a ring remembers the last of those
        with torch.no_grad():
            self.weights = weights_of(model, precision)
            table = model.position_embedding
            self._learned = None if table is None else table.weight.detach().float()
        low = precision != "fp32" and not exact
        self.cache_dtype = torch.bfloat16 if low else torch.float32
        self.read_dtype = torch.bfloat16 if low and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
        self._products = WithManyFused() if torch.backends.mkldnn.is_available() else WithMany()
        self._turned: list[Tensor] = []
        if config.position == "rope":
            positions = torch.arange(self.reach)[None]
            lengths = torch.full((1, 1), self.reach) if config.rope_scaling == "dynamic" else None
            self._turned = [each[0] for each in rotation(config, positions, lengths)]  # each (reach, Dh/2)
        self._ring = 0
        """Places of the cache, where a sliding window leaves fewer than `reach` to remember; the place of a position is
        then its remainder. 0: as many as there are tokens."""
        if config.sliding_window and (ring := -(-(config.sliding_window + SLACK) // PLACES) * PLACES) < self.reach:
            self._ring = ring
        self._places = torch.arange(self.reach) % (self._ring or self.reach)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._seen = torch.empty(0, PLACES)
        self._views: list[Tensor] = []
        self._reserve(4 * PLACES)
        self._run: Run | None = None
        self._graphs: ChunkGraphs | None = None
        started, known = time.perf_counter(), is_compiled(config, precision, self.cache_dtype)
        prompt_known = config.is_moe or is_chunk_compiled(config, precision, self.read_dtype)
        if compile_prompt is None:
            compile_prompt = compile and (prompt_known or not known)
        if compile:
            example = self._inputs(torch.zeros(1, dtype=torch.int64), 0, 4)
            self._run = compiled(config, precision, self.cache_dtype, example)
        if compile_prompt and not config.is_moe:
            in_order = None
            if can_be_ordered(self.weights, self.read_dtype):
                make = partial(ordered, self.weights)
                in_order = kept_for(model, f"in order for prompts, {precision}", lambda: cache(make))
            self._graphs = ChunkGraphs(config, precision, self.read_dtype, self.weights, in_order)
        nothing_new = (known or not compile) and (prompt_known or not compile_prompt)
        seconds = 0.0 if nothing_new else time.perf_counter() - started
        self.info = DecoderInfo(precision, self._bytes_read(), seconds)

    def _bytes_read(self) -> int:
        share = self.config.n_experts_per_token / self.config.n_experts if self.config.is_moe else 1.0
        tied = self.config.tie_embeddings
        total = 0.0
        for name, tensor in self.weights.items():
            if not tied and name.startswith("embedding"):
                continue  # one row of it
            total += tensor.nbytes * (share if name.split(".")[0] in ("gate", "up", "down") else 1)
        return round(total)

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids`; the logits after the last, (V,) fp32. Memory beside the cache does not grow with their number.

        Raises `ClockhandError` for an id beyond the vocabulary, for none at all, or for more than `reach` in all.
        """
        check_ids(self.config, ids, self.length, self.reach)
        numbers = torch.tensor(ids, dtype=torch.int64)
        x = torch.empty(0)
        for start in range(0, len(ids), CHUNK):
            x = self._read_chunk(numbers[start : start + CHUNK], last=start + CHUNK >= len(ids))
        return self._logits(x[-1:])[0]

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids`, read at once; the logits after each, (T, V) fp32. Raises `ClockhandError` as `read` does."""
        check_ids(self.config, ids, self.length, self.reach)
        return self._logits(self._read_chunk(torch.tensor(ids, dtype=torch.int64), last=False))

    def _logits(self, x: Tensor) -> Tensor:  # (T, D) -> (T, V) fp32
        head = unpack(head_of(self.weights)).to(x.dtype)
        return F.linear(hidden_norm(self.config, self.weights, x), head).float()

    @torch.no_grad()
    def step(self, id: int) -> Tensor:
        """Appends one id; the logits after it, (V,) fp32. Raises `ClockhandError` as `read` does."""
        check_ids(self.config, (id,), self.length, self.reach)
        position = self.length
        self._reserve(position + 1)
        self.length += 1
        self._written = max(self._written, self.length)
        self._see(position)
        blocks = max(2, -(-min(self.length, self._ring or self.length) // PLACES))
        number = torch.tensor((id,))
        if self._run is None:
            return Step(self.config)(*self._inputs(number, position, blocks))
        if len(self._views) == 0 or self._views[-1].shape[0] != blocks:  # sixty tensors: only every 64 tokens
            _, keys, values, seen, *_ = self._inputs(number, position, blocks)
            self._views = [*self.weights.values(), *keys, *values, seen]
        rows = slice(position, self.length)
        now = [number, self._places[rows], *(each[rows] for each in self._turned)]
        learned = [] if self._learned is None else [self._learned[rows]]
        return self._run([*self._views, *now, *learned])[0]

    def extend(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids` by the better of the two ways; the logits after the last, (V,) fp32."""
        return self.step(ids[0]) if len(ids) == 1 and self.length else self.read(ids)

    def can_truncate(self, length: int) -> bool:
        """Whether a sliding window still has what would be seen then: it keeps 64 tokens more."""
        window = self.config.sliding_window
        first = max(0, length - window + 1) if window else 0  # that the next token sees
        return length == 0 or not self._ring or self._written - first <= self._ring

    def truncate(self, length: int) -> None:
        """Forgets every token at position `length` and beyond. Raises `ClockhandError` unless it `can_truncate`."""
        if length < 0:
            raise ClockhandError(f"length = {length} must be 0 or more")
        if not self.can_truncate(length):
            raise ClockhandError(
                f"length = {length} is too far back: of {self._written} tokens the sliding window has kept {self._ring}"
            )
        self.length = min(length, self.length)
        self._written = self._written if length else 0
        self._see_all()

    def _see_all(self) -> None:
        window = self.config.sliding_window
        self._seen.fill_(UNSEEN)
        self._seen.view(-1)[self._places[max(0, self.length - window + 1) if window else 0 : self.length]] = 0

    def _see(self, position: int) -> None:
        window = self.config.sliding_window
        self._seen.view(-1)[self._places[position]] = 0
        if window and position >= window:
            self._seen.view(-1)[self._places[position - window]] = UNSEEN

    def _inputs(self, id: Tensor, position: int, blocks: int) -> tuple[Any, ...]:
        rows = slice(position, position + 1)
        return (
            self.weights,
            [each[:blocks] for each in self._keys],
            [each[:blocks] for each in self._values],
            self._seen[:blocks],
            id,
            self._places[rows],
            [each[rows] for each in self._turned],
            [] if self._learned is None else [self._learned[rows]],
        )

    def _reserve(self, tokens: int) -> None:
        """Room for `tokens`, by doubling. Zeros, since what is not seen is multiplied by 0, and 0 · NaN is NaN."""
        needed = -(-min(tokens, self._ring or tokens) // PLACES)
        held = len(self._seen)
        if needed <= held:
            return
        blocks, config = max(needed, 2 * held), self.config
        if self._ring:
            blocks = min(blocks, self._ring // PLACES)
        for tensors, shape in zip((self._keys, self._values), cache_shapes(config, blocks)):
            # All layers in one piece: of one alone much would lie beside the borders of the large pages.
            grown = torch.empty(config.n_layers, *shape, dtype=self.cache_dtype)
            use_large_pages(grown, now=False)  # asked before anything is written: pages come with the first number
            grown.zero_()
            for new, old in zip(grown, tensors):
                new[:held] = old
            tensors[:] = grown.unbind()
        seen = torch.full((blocks, PLACES), UNSEEN)
        seen[:held] = self._seen
        self._seen, self._views = seen, []

    # ---- the prompt ----

    def _read_chunk(self, ids: Tensor, last: bool) -> Tensor:
        """One chunk (T,): what leaves the last block, and of the last chunk only its last tokens."""
        config, weights, dtype = self.config, self.weights, self.read_dtype
        begin, end = self.length, self.length + len(ids)
        self._reserve(end)
        x = embed(weights, ids, dtype)  # (T, D)
        if self._learned is not None:
            x = x + self._learned[begin:end].to(dtype)
        turned = (self._turned[0][begin:end], self._turned[1][begin:end]) if self._turned else None
        window = config.sliding_window
        before = self._places[max(0, begin - window + 1) if window else 0 : begin]
        graphs = self._graphs if len(ids) > 1 else None
        mixture = self._mix if config.is_moe else None
        held = len(before) if self._ring else begin
        seen = [] if graphs is None else seen_by_block(len(ids), held + len(ids), window)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            memory = (self._keys[layer], self._values[layer])
            if self._ring:  # its places are no longer in order, and hold less than a chunk and a window
                past = recall_places(memory, before, q.dtype)
                kept = slice(max(0, len(k) - self._ring), None)
                remember(memory, k[kept], v[kept], self._places[begin:end][kept])
                k, v = torch.cat((past[0], k)), torch.cat((past[1], v))
            else:
                remember_many(memory, k, v, self._places[begin:end], begin)
                if begin:
                    k, v = recall(memory, end, q.dtype)
            return attend_many(q, k, v, window) if graphs is None else graphs.attend(q, k, v, seen)

        for layer in range(config.n_layers):
            only_last = last and layer == config.n_layers - 1  # what else would come out, nobody reads
            if graphs is None:
                x = block(config, weights, layer, x, turned, self._products, attend, mixture, only_last)
                continue
            q, k, v = graphs.before(layer, x, turned or ())
            if only_last:  # and the one before, as the graphs are for two and more
                q, x, seen = q[-2:], x[-2:], [seen[-1][-2:]]
            x = graphs.after(layer, x, attend(q, k, v))
        self.length = end
        self._written = max(self._written, end)
        self._see_all()
        return x

    def _mix(self, x: Tensor, layer: int) -> Tensor:
        """A layer's experts, each on the tokens that chose it."""
        config, weights = self.config, self.weights
        routing = route(
            F.linear(x.float(), weights["router"][layer]), config.n_experts_per_token, config.renormalize_top_k
        )
        answer = torch.zeros_like(x)
        for expert in range(config.n_experts):
            rows, choice = (routing.experts == expert).nonzero(as_tuple=True)
            if len(rows):
                share = routing.weights[rows, choice, None].to(x.dtype)
                thought = dense(config, weights, layer, x[rows], WithMany(), expert=expert)
                answer.index_add_(0, rows, thought * share)
        return answer


# ---- whether to take it ----


def decoder_for(model: nn.Module, reach: int, new_tokens: int) -> Decoder | None:
    """An exact decoder in the model's precision where it is the faster way to `new_tokens` of one text, else None.

    It is where the compiled step lies in the cache folder, or where so many tokens repay compiling it. Then as without
    it activations and cache are fp32, so that no text depends on what lies in a cache folder.
    """
    if not isinstance(model, Transformer):
        return None
    config, precision = model.config, precision_of(model)
    plain = precision != "fp32" or model.dtype == torch.float32
    if model.device.type != "cpu" or not plain or new_tokens < 2:
        return None
    if not is_compiled(config, precision):
        if not is_worth_compiling(config, 4 * total_parameters(config), new_tokens, precision):
            return None
        if compiler() is None:
            print("note: no C++ compiler (g++, or CXX): text is generated the plain, slower way", file=sys.stderr)
            return None
    try:
        return Decoder(model, reach=reach, exact=True)
    except ClockhandError as error:  # the cache folder cannot be written, say
        print(f"note: {error}: text is generated the plain, slower way", file=sys.stderr)
        return None
