"""Speed beside the peers that are installed: one file for each kind of work, the shared means in `measure.py`."""

WORKS = {
    "decode": "one text, token after token",
    "prefill": "a prompt of 512 tokens at once",
    "batch": "32 texts at once, token after token",
    "context": "what a token costs with up to 8,192 before it",
    "moe": "decoding with experts, beside a dense model",
    "train": "training steps of 8 × 512 tokens",
    "experts": "training steps with experts, beside a dense model",
}
"""What each measures. The other files, `contest` and `peers`, are what they share."""
