"""The limit on failed samples: a failed sample is recorded and skipped, but too many of them stop the run."""

from collections.abc import Sequence

from pos2distill.errors import UserError
from pos2distill.proportions import wilson_interval

FAILED = ("failed", "empty")  # outcomes
_MIN_SAMPLES = 20  # a fraction of fewer samples says too little
_SHOWN_ERRORS = 3
# Standard errors of the lower bound. The fraction is checked after every part, so a bound of 1.64 (5 %) would be
# exceeded by chance in many runs.
_STANDARD_ERRORS = 3.0


class FailureGuard:
    """Stops a run once too large a fraction of its samples failed or is empty.

    Before all samples are there, it stops the run only if there is no doubt: if the lower end of Wilson's interval is
    above the limit. So the decision does not depend on which samples come first. `finish` compares the fraction itself.

    Args:
        max_fraction: the largest allowed fraction of failed and empty samples.
        stored: number of samples of earlier runs.
        stored_failed: how many of them failed or are empty. Samples of earlier runs count in `finish` only, since the
            cause of their failure may be over.
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
            UserError: the fraction is exceeded beyond doubt; names the first errors.
        """
        for outcome, error, sample_id in zip(outcomes, errors, sample_ids, strict=True):
            self.seen += 1
            if outcome in FAILED:
                self.failed += 1
                # The others are only counted: a broken engine fails at every sample, mostly for the same reason.
                if len(self._first_errors) < _SHOWN_ERRORS:
                    self._first_errors.append(f"sample {sample_id}: {error or 'an empty answer'}")
        # With few or no failures the lower end is 0, except for rounding.
        exceeds = self.failed > self.max_fraction * self.seen
        if not exceeds or self.seen < _MIN_SAMPLES:
            return
        low, _ = wilson_interval(self.failed / self.seen, self.seen, _STANDARD_ERRORS)
        if low > self.max_fraction:
            raise self._error(self.failed, self.seen)

    def finish(self) -> None:
        """Check the fraction over all samples, once the needed ones are there.

        Raises:
            UserError: the fraction is exceeded; names the first errors of this run.
        """
        failed, seen = self.failed + self.stored_failed, self.seen + self.stored
        if failed > self.max_fraction * seen:
            raise self._error(failed, seen)

    def _error(self, failed: int, seen: int) -> UserError:
        first_errors = f": {'; '.join(self._first_errors)}" if self._first_errors else ""
        return UserError(f"{describe_failures(failed, seen, self.max_fraction)}{first_errors}")


def describe_failures(failed: int, seen: int, max_fraction: float) -> str:
    """The part of a message that reports too many failed samples."""
    return f"{failed} of {seen} samples failed (more than runtime.max_failed_fraction={max_fraction:g})"
