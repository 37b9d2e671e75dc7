"""One stream, token after token, greedily: ours in each precision, each peer in what it has nearest to it."""

from collections.abc import Callable

from clockhand.bench.contest import TORCH_DTYPES, Report, check_fits, contest, report
from clockhand.bench.measure import alternate, limits
from clockhand.infer.decode import Decoder

PROMPT = [1, 2, 3, 4]


def run(preset: str, peers: list[str], rounds: int = 5, new_tokens: int = 96) -> Report:
    with contest(preset) as work:
        check_fits(work, len(PROMPT) + new_tokens)
        contestants: dict[str, Callable[[], float]] = {}
        bounds, walls, few = {}, limits(), max(new_tokens // 4, 1)
        for precision in ("fp32", "bf16", "int8"):
            decoder = Decoder(work.model, precision, exact=True)  # the step that `generate` takes, and warm for it
            contestants[f"clockhand {precision}"] = ours(decoder, new_tokens)
            bounds[f"clockhand {precision}"] = walls.decode_tok_per_s(decoder.info.weight_bytes)
            if "llama.cpp" in peers:
                from clockhand.bench.peers import InLlamaCpp

                llama = InLlamaCpp(work.gguf(precision), len(PROMPT) + new_tokens + 32)
                contestants[f"llama.cpp {precision}"] = lambda llama=llama: llama.decode(PROMPT, new_tokens)  # type: ignore[misc]
            if "transformers" in peers and precision in TORCH_DTYPES:
                from clockhand.bench.peers import InTransformers

                theirs = InTransformers(work.hugging_face(), TORCH_DTYPES[precision])
                contestants[f"transformers {precision}"] = lambda theirs=theirs: theirs.decode(PROMPT, few)  # type: ignore[misc]
        return report("decode, one stream", preset, alternate(contestants, rounds), bounds, walls)


def ours(decoder: Decoder, new_tokens: int) -> Callable[[], float]:
    from clockhand.bench.measure import seconds

    def once() -> float:
        decoder.truncate(0)
        first = int(decoder.read(PROMPT).argmax())

        def steps() -> None:
            id = first
            for _ in range(new_tokens):
                id = int(decoder.step(id).argmax())

        return new_tokens / seconds(steps)

    return once
