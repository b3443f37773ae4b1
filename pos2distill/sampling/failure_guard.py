"""The limit on failed samples: a failed sample is recorded and skipped, but too many of them stop the run."""

import math
from collections.abc import Sequence

from pos2distill.errors import UserError

FAILED = ("failed", "empty")  # outcomes
_MIN_SAMPLES = 20  # until then, a fraction says too little
_SHOWN_ERRORS = 3
# Standard errors of the lower bound. The fraction is looked at after every part, so that of 1.64 (5 %) would be
# exceeded by chance in many runs.
_STANDARD_ERRORS = 3.0


class FailureGuard:
    """Stops a run once too large a fraction of its samples failed or is empty.

    Before all samples are there, it stops only if their number leaves no doubt: if the lower end of Wilson's interval
    is above the limit. So it does not depend on which samples come first. In the end the fraction itself counts.

    Args:
        max_fraction: of failed and empty samples.
        stored, stored_failed: samples of earlier runs, and those of them that failed or are empty. They count in the
            end alone, since what made them fail may be over.
    """

    def __init__(self, max_fraction: float, *, stored: int = 0, stored_failed: int = 0) -> None:
        self.max_fraction = max_fraction
        self.stored = stored
        self.stored_failed = stored_failed
        self.seen = 0
        self.failed = 0
        self._first_errors: list[str] = []

    def add(self, outcomes: Sequence[str], errors: Sequence[str | None], sample_ids: Sequence[str]) -> None:
        """Count samples.

        Raises:
            UserError: with the first errors, if the fraction is exceeded beyond doubt.
        """
        for outcome, error, sample_id in zip(outcomes, errors, sample_ids, strict=True):
            self.seen += 1
            if outcome in FAILED:
                self.failed += 1
                # The others are only counted: a broken engine fails at every sample, mostly for the same reason.
                if len(self._first_errors) < _SHOWN_ERRORS:
                    self._first_errors.append(f"sample {sample_id}: {error or 'an empty answer'}")
        # The lower end of few or no failures is 0 up to rounding.
        exceeds = self.failed > self.max_fraction * self.seen
        if exceeds and self.seen >= _MIN_SAMPLES and _lower_bound(self.failed, self.seen) > self.max_fraction:
            raise self._error(self.failed, self.seen)

    def finish(self) -> None:
        """All samples that are needed are there.

        Raises:
            UserError: with the first errors of this run, if the fraction is exceeded.
        """
        failed, seen = self.failed + self.stored_failed, self.seen + self.stored
        if failed > self.max_fraction * seen:
            raise self._error(failed, seen)

    def _error(self, failed: int, seen: int) -> UserError:
        first_errors = f": {'; '.join(self._first_errors)}" if self._first_errors else ""
        return UserError(f"{describe_failures(failed, seen, self.max_fraction)}{first_errors}")


def describe_failures(failed: int, seen: int, max_fraction: float) -> str:
    """What a message says of too many failed samples."""
    return f"{failed} of {seen} samples failed (more than runtime.max_failed_fraction={max_fraction:g})"


def _lower_bound(failed: int, seen: int) -> float:
    """The lower end of Wilson's interval for the fraction of failures."""
    fraction, z2 = failed / seen, _STANDARD_ERRORS**2
    spread = math.sqrt(z2 * (fraction * (1 - fraction) / seen + z2 / (4 * seen**2)))
    return (fraction + z2 / (2 * seen) - spread) / (1 + z2 / seen)
