"""Mutation testing: the parts of ``benchmarks/mutation.py``.

``mutants.py`` says what may be changed in a module and draws from that, ``operators.py`` asks cosmic-ray for the changes,
``reach.py`` finds out which tests execute which line, ``sandbox.py`` runs tests in a copy of the tree.
"""
