"""Caesura: a rollout engine for reinforcement learning of language models that can be paused at any step.

Users import from :mod:`caesura.client`; the engine process lives in :mod:`caesura.scheduler`. They
meet in :mod:`caesura.io_struct` alone.
"""

__version__ = "0.1.0"
"""The only place where the version is written; CHANGELOG.md says what is in it."""
