"""The limit on failed samples: a failed sample is recorded and skipped, but too many of them stop the run."""

from collections.abc import Sequence

from pos2distill.errors import UserError

_MIN_SAMPLES = 20  # until then, a fraction says too little
_SHOWN_ERRORS = 3


class FailureGuard:
    """Stops a run once too large a fraction of its samples failed or is empty.

    Args:
        max_fraction: of failed and empty samples.
        total: samples to expect. The fraction is checked from 20 samples on, or from `total` if that is less.
    """

    def __init__(self, max_fraction: float, total: int) -> None:
        self.max_fraction = max_fraction
        self.min_samples = min(_MIN_SAMPLES, total)
        self.seen = 0
        self.failed = 0
        self._first_errors: list[str] = []

    def add(self, outcomes: Sequence[str], errors: Sequence[str | None], example_ids: Sequence[str]) -> None:
        """Count samples.

        Raises:
            UserError: with the first errors, if the fraction is exceeded.
        """
        for outcome, error, example_id in zip(outcomes, errors, example_ids, strict=True):
            self.seen += 1
            if outcome in ("failed", "empty"):
                self.failed += 1
                # The others are only counted: a broken engine fails at every sample, mostly for the same reason.
                if len(self._first_errors) < _SHOWN_ERRORS:
                    self._first_errors.append(f"example {example_id}: {error or 'an empty answer'}")
        if self.seen >= self.min_samples and self.failed > self.max_fraction * self.seen:
            raise UserError(
                f"{self.failed} of {self.seen} samples failed (more than runtime.max_failed_fraction="
                f"{self.max_fraction:g}): {'; '.join(self._first_errors)}"
            )
