"""Weights in, weights out: other projects' words in `names.py`, their formats one file each."""
