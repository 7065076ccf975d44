"""What libraries read from the environment once, when they are loaded: set before anything imports torch.

Invariant: values that the user has set are kept.
"""

import os


def prepare() -> None:
    """Set what suits a process that computes steps."""
    # OpenMP's threads spin for milliseconds between kernels by default. The engine shares its cores with a trainer and a
    # front end, and then a spinning thread holds the core that its partner needs: 5,000 to 20,000 turns cost 10 to 30 %
    # beside one busy process, and gain at most 4 % on idle cores (docs/contributing/experiments.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # torch and oneDNN keep a compiled primitive for each shape they have met, up to 1,024 of them: with prompts of every
    # length, memory grew by half a gigabyte on the tiny model. 64 cost no measurable speed.
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    # torch's flight recorder keeps a record of the last 2,000 broadcasts: 1.5 MB that look like a leak.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
