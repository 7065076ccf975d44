"""Storage behind a workspace, for tests of how much each user takes."""

from torch import Tensor

from caesura.scheduler.memory.workspace import Workspace


def memory_of(workspace: Workspace, purpose: str) -> Tensor | None:
    """Return all that is held for ``purpose`` as one row of its dtype, or None if nothing was ever taken."""
    held = workspace._taken.get(purpose)
    return None if held is None else held[0]


def addresses_of(workspace: Workspace) -> dict[str, int]:
    return {purpose: memory.data_ptr() for purpose, (memory, _) in workspace._taken.items()}
