"""The gate of the command `evaluate`: its limits, also as options of a command line that runs as a job."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    """Limits in percentage points; None: not checked.

    Attributes:
        gap_above: limit of the GAP.
        mean_below: limit of the mean accuracy.
        drop_above: limit of the drop of the mean below that of `baseline`, the folder or URL of an evaluation.
    """

    gap_above: float | None = None
    mean_below: float | None = None
    drop_above: float | None = None
    baseline: str | None = None

    def limits(self) -> dict[str, float]:
        """The limits that were given, by their options."""
        limits = {
            "--fail-if-gap-above": self.gap_above,
            "--fail-if-mean-below": self.mean_below,
            "--fail-if-drop-above": self.drop_above,
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


NO_GATE = Gate()
