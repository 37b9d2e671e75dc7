"""What a Transformer is made of, one part a file. Start at `transformer.py`."""
