"""Speed beside the peers that are installed: one file for each kind of work, the shared means in `measure.py`."""
