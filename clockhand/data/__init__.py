"""From text to tokens to batches. Knows nothing of models."""
