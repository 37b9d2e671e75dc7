"""The neighbours, used as they are meant to be, on the same weights: transformers' generate, llama.cpp's batches.

Each answers how fast it did a piece of work, in tokens per second. llama.cpp is driven through its C functions, so that
no Python of the binding is counted; both get as many threads as torch has.
"""

import ctypes
import time
from pathlib import Path
from typing import Any

import torch

from clockhand.bench.measure import machine


class InTransformers:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def decode(self, prompt: list[int], new_tokens: int) -> float:
        """Greedy; the time of the prompt, measured as a call for one token, is taken off."""
        ids = torch.tensor([prompt])
        whole = self._generate(ids, new_tokens + 1)
        return new_tokens / (whole - self._generate(ids, 1))

    @torch.no_grad()
    def batch(self, rows: int, new_tokens: int) -> float:
        ids = torch.full((rows, 1), 7)
        return rows * new_tokens / (self._generate(ids, new_tokens + 1) - self._generate(ids, 1))

    @torch.no_grad()
    def prefill(self, ids: list[int]) -> float:
        started = time.perf_counter()
        self.model(torch.tensor([ids]), logits_to_keep=1)
        return len(ids) / (time.perf_counter() - started)

    def _generate(self, ids: torch.Tensor, new_tokens: int) -> float:
        started = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started


class InLlamaCpp:
    def __init__(self, file: Path, context: int, rows: int = 1, largest_batch: int = 512) -> None:
        import llama_cpp as c

        self.c: Any = c
        _quiet_llama()
        self.rows, self.size = rows, max(largest_batch, rows)
        of_model, of_context = c.llama_model_default_params(), c.llama_context_default_params()
        of_context.n_ctx, of_context.n_seq_max = context * rows, rows
        of_context.n_batch = of_context.n_ubatch = self.size
        of_context.n_threads = of_context.n_threads_batch = torch.get_num_threads()
        # Its order of matrices for AMX ends in a crash (0.3.36): without it, where a processor has that.
        of_model.use_extra_bufts = "amx_bf16" not in machine().features
        self.model = c.llama_model_load_from_file(str(file).encode(), of_model)
        self.context = c.llama_init_from_model(self.model, of_context)
        self.tokens = c.llama_batch_init(self.size, 0, 1)
        self.vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))

    def close(self) -> None:
        self.c.llama_batch_free(self.tokens)
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)

    def prefill(self, ids: list[int]) -> float:
        self._clear()
        started = time.perf_counter()
        for begin in range(0, len(ids), self.size):
            part = ids[begin : begin + self.size]
            self._run([(id, begin + i, 0) for i, id in enumerate(part)], last_only=True)
        self._best(-1)
        return len(ids) / (time.perf_counter() - started)

    def decode(self, prompt: list[int], new_tokens: int) -> float:
        self.prefill(prompt)
        id = self._best(-1)
        started = time.perf_counter()
        for position in range(len(prompt), len(prompt) + new_tokens):
            self._run([(id, position, 0)])
            id = self._best(-1)
        return new_tokens / (time.perf_counter() - started)

    def batch(self, new_tokens: int) -> float:
        self._clear()
        ids = [7] * self.rows
        self._run([(id, 0, row) for row, id in enumerate(ids)])
        started = time.perf_counter()
        for position in range(1, new_tokens + 1):
            self._run([(id, position, row) for row, id in enumerate(ids)])
            ids = [self._best(row) for row in range(self.rows)]
        return self.rows * new_tokens / (time.perf_counter() - started)

    def _clear(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def _run(self, tokens: list[tuple[int, int, int]], last_only: bool = False) -> None:
        batch = self.tokens
        batch.n_tokens = len(tokens)
        for i, (id, position, row) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = id, position, 1, row
            batch.logits[i] = not last_only or i == len(tokens) - 1
        if self.c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama.cpp could not run a batch")

    def _best(self, row: int) -> int:
        import numpy as np

        logits = self.c.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())


def quantize_in_llama_cpp(source: Path, target: Path) -> None:
    """Writes the GGUF file `source` once more with all its matrices in q4_0."""
    import llama_cpp as c

    _quiet_llama()
    params = c.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = c.LLAMA_FTYPE_MOSTLY_Q4_0, True, torch.get_num_threads()
    if c.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp could not quantize {source}")


_silence: list[Any] = []


def _quiet_llama() -> None:
    import llama_cpp as c

    if not _silence:
        _silence.append(c.llama_log_callback(lambda *ignored: None))  # kept, or the C side would call freed memory
        c.llama_log_set(_silence[0], ctypes.c_void_p(0))
