"""Number of examples that a property is tried with."""

from hypothesis import settings

_USUAL = settings.get_profile("default").max_examples
_LEAST = 10


def examples(number: int) -> int:
    """Return ``number`` where the profile tries as many examples as Hypothesis does by default."""
    share = settings().max_examples / _USUAL
    return max(min(number, _LEAST), round(number * share))
