"""What a token costs as the text behind it grows, up to 8,192 tokens: the bytes of the cache at the memory's speed?"""

from clockhand.bench.contest import Report, contest, report
from clockhand.bench.measure import Measured, limits, seconds
from clockhand.infer.decode import Decoder

LENGTHS = (64, 1024, 2048, 4096, 8192)


def run(preset: str, peers: list[str], rounds: int = 3, steps: int = 8) -> Report:
    """Milliseconds a token in fp32; the bounds are the shortest length's and the bytes of the cache beyond it."""
    with contest(preset, max_seq_len=LENGTHS[-1] + 64) as work:
        walls, config = limits(), work.config
        decoder = Decoder(work.model, "fp32")
        times: dict[str, list[float]] = {f"at {length:,}": [] for length in LENGTHS}
        for _ in range(rounds):
            for length in LENGTHS:
                decoder.truncate(0)
                decoder._reserve(length + steps)
                decoder.length = length  # an empty past costs as much to read as any other
                decoder.truncate(length)
                decoder.step(1)
                taken = seconds(lambda: [decoder.step(1) for _ in range(steps - 1)])
                times[f"at {length:,}"].append(1000 * taken / (steps - 1))
        results = {name: Measured(tuple(each), "ms") for name, each in times.items()}
        bytes_a_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * decoder.cache_dtype.itemsize
        shortest = min(each.median for each in results.values())
        bounds = {
            f"at {length:,}": shortest + 1000 * bytes_a_token * (length - LENGTHS[0]) / (walls.read_gb_per_s * 1e9)
            for length in LENGTHS[1:]
        }
        return report("a decode step against context length", preset, results, bounds, walls)
