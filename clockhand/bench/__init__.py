"""Speed beside the peers that are installed: one file for each kind of work, and the means they share in `measure`,
`contest` and `peers`."""

WORKS = {
    "decode": "one text, token after token (1 minute; 3 the first time)",
    "prefill": "a prompt of 512 tokens at once (1 minute; 2 the first time)",
    "batch": "32 texts at once, token after token (1 minute; 2 the first time)",
    "context": "a token with up to 8,192 before it (1 minute)",
    "moe": "one text, with experts and without (1 minute; 2 the first time)",
    "train": "training steps of 8 × 512 tokens (3 minutes)",
    "experts": "the same with experts and without (4 minutes)",
}
"""What each measures, and about how long that takes. What they share is in the other files."""
