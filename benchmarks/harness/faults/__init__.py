"""Faults in a running system, and what must be true after each: the parts of ``benchmarks/faults.py``.

``known.py`` are weights whose every greedy token is known beforehand, ``ledger.py`` keeps account of what was asked and what
came back, ``witness.py`` is a client that counts, ``actors.py`` are processes that faults happen to, ``proxies.py`` stand
between clients and the scheduler, ``footprint.py`` is what a process holds, ``life.py`` one engine from start to end,
``kinds.py`` the faults, ``campaign.py`` their order and the checks after each.
"""
