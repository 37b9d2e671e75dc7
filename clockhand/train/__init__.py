"""Training: a loss, an optimizer, a schedule, checkpoints, and the one loop that uses them."""
