"""How many failures sampling bears: a bad row is recorded and passed over, a bad run is stopped."""

from collections.abc import Sequence

from pos2distill.errors import UserError

_ENOUGH = 20
_SHOWN = 3


class FailureGuard:
    """Stops a run once too large a share of its samples has failed or is empty.

    Args:
        max_share: the share that is borne.
        total: samples that are to come; the share counts from 20 of them on, or from all if they are fewer.
    """

    def __init__(self, max_share: float, total: int) -> None:
        self.max_share = max_share
        self.enough = min(_ENOUGH, total)
        self.seen = 0
        self.failed = 0
        self._shown: list[str] = []

    def add(self, outcomes: Sequence[str], errors: Sequence[str | None], example_ids: Sequence[str]) -> None:
        """Count samples.

        Raises:
            UserError: with the first errors, once the share is exceeded.
        """
        for outcome, error, example_id in zip(outcomes, errors, example_ids, strict=True):
            self.seen += 1
            if outcome in ("failed", "empty"):
                self.failed += 1
                if len(self._shown) < _SHOWN:
                    self._shown.append(f"example {example_id}: {error or 'an empty answer'}")
        if self.seen >= self.enough and self.failed > self.max_share * self.seen:
            raise UserError(
                f"{self.failed} of {self.seen} samples failed (more than runtime.max_failed_fraction="
                f"{self.max_share:g}): {'; '.join(self._shown)}"
            )
