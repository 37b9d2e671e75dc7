"""clockhand: the modern decoder-only Transformer from scratch, small enough to read, complete enough to use."""

__version__ = "0.1.0"
