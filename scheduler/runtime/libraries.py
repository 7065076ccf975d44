"""Settings that libraries read from the environment when they are loaded, before anything imports torch."""

import os

_SETTINGS = {
    # OpenMP's threads spin for milliseconds between kernels by default. The engine shares its cores with a
    # trainer and a front end, and then a spinning thread holds the core that its partner needs: 5,000 to
    # 20,000 turns cost 10 to 30 % beside one busy process, and gain at most 4 % on idle cores
    # (docs/contributing/experiments.md).
    "GOMP_SPINCOUNT": "1000",
    # torch and oneDNN keep a compiled primitive for each shape they have met, up to 1,024 of them: with
    # prompts of every length, memory grew by half a gigabyte on the tiny model. 64 cost no measurable speed.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # numpy asks for huge pages where an array of 4 MB or more lies, also in malloc's heap. Of what
    # malloc_trim gives back there, the kernel may fill every 2 MB that have a page in use with a huge page
    # again.
    "NUMPY_MADVISE_HUGEPAGE": "0",
    # torch's flight recorder keeps a record of the last 2,000 broadcasts: 1.5 MB that look like a leak.
    "TORCH_FR_BUFFER_SIZE": "0",
}


def settings() -> dict[str, str]:
    return {name: value for name, value in _SETTINGS.items() if name not in os.environ}
