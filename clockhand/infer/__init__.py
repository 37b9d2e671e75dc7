"""Text out of a model. `sampling.py` draws one token, `generate.py` a whole text, slowly and plainly right."""
