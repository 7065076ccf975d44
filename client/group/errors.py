"""What a fleet raises beyond the errors of one engine."""

from collections.abc import Mapping

from ..exceptions import EngineError


class FleetUpdateFailed(EngineError):  # noqa: N818  (as the errors of one engine)
    """An update of a fleet was not committed anywhere: no member serves the new weights.

    Members that had written a byte are poisoned and fenced; the others serve the weights that they had.

    Attributes:
        reasons: the error of each member that had one, by name.
        serving: names of the members that still serve, with the weights of before.
    """

    error_code = EngineError.error_code

    def __init__(self, reasons: Mapping[str, EngineError], serving: list[str]) -> None:
        told = "; ".join(f"{name}: {error.message}" for name, error in reasons.items())
        super().__init__(
            f"no engine was updated: {told}",
            members={name: error.message for name, error in reasons.items()},
            serving=serving,
        )
        self.reasons = dict(reasons)
        self.serving = serving
        first = next(iter(reasons.values()), None)
        if first is not None:
            self.code = first.code
