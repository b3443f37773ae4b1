"""The options that make a gate of the command `evaluate`, also where it runs as a job."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateOptions:
    """Limits in percentage points, named as on the command line; None: not given.

    Attributes:
        fail_if_gap_above: limit of the GAP.
        fail_if_mean_below: limit of the mean accuracy.
        fail_if_drop_above: limit of the drop of the mean below that of `baseline`, the folder or URL of an evaluation.
    """

    fail_if_gap_above: float | None = None
    fail_if_mean_below: float | None = None
    fail_if_drop_above: float | None = None
    baseline: str | None = None

    def limits(self) -> dict[str, float]:
        """The limits that were given, by their options."""
        limits = {
            "--fail-if-gap-above": self.fail_if_gap_above,
            "--fail-if-mean-below": self.fail_if_mean_below,
            "--fail-if-drop-above": self.fail_if_drop_above,
        }
        return {option: points for option, points in limits.items() if points is not None}

    def given(self) -> dict[str, str]:
        """The options that were given, with their values as text."""
        values = {option: f"{points:g}" for option, points in self.limits().items()}
        if self.baseline is not None:
            values["--baseline"] = self.baseline
        return values

    def words(self) -> list[str]:
        """The options that were given, as words of a command line."""
        return [f"{option}={value}" for option, value in self.given().items()]


NO_GATE = GateOptions()
