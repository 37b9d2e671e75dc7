"""The step of generation in C++: rows of ids through a whole model, and into its cache, on a CPU.

    vectors.h   vectors as wide as the processor's        threads.h   a team that waits without sleeping
    product.h   a few rows by a matrix, packed            attend.h    queries over the cache
    step.h      what Python sees                          step.cpp    the model, read downward

    build.py    makes the library, once for each kind of processor
    library.py  loads the one for this processor
    weights.py  packs a model for it
    runner.py   runs it, with a cache of so many slots

Nothing is compiled while clockhand runs: the libraries come with the wheel, or are built where clockhand is installed
from its source. An `Engine` runs by it where `routes.py` says so.
"""
