"""The samples that are trained on: the first kept ones in index order, as many as are wanted.

So their number does not depend on how many answers are wrong, as long as enough are kept, and the choice does not
depend on the order in which answers arrive.

Shapes: N samples.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pos2distill.records import Bools


class Selection:
    """What is known of N samples, of which the first `wanted` kept ones are trained on.

    Args:
        sampled_N: which samples were made.
        kept_N: which of them are kept; ignored where `sampled_N` is False.
        wanted: kept samples to train on.
    """

    def __init__(self, sampled_N: Bools, kept_N: Bools, wanted: int) -> None:
        self.sampled_N = sampled_N.copy()
        self.kept_N = kept_N & sampled_N
        self.wanted = wanted

    def copy(self) -> "Selection":
        """A selection of its own. Call it on one that was received from Ray 2.60, whose arrays are read-only."""
        return Selection(self.sampled_N, self.kept_N, self.wanted)

    def add(self, indices: Sequence[int], kept: Sequence[bool]) -> None:
        """Record samples as made, and which are kept."""
        self.sampled_N[list(indices)] = True
        self.kept_N[list(indices)] = kept

    @property
    def end(self) -> int:
        """Samples from this index on are not needed: as many as wanted are kept before it. N if there are too few.

        It can only become smaller while more are sampled, unless a sample is made again and not kept this time; once
        all samples before it are sampled, it is final.
        """
        return _end(self.kept_N, self.wanted)

    @property
    def certain_end(self) -> int:
        """Samples before this index are needed, even if all that are not sampled yet will be kept."""
        return _end(self.kept_N | ~self.sampled_N, self.wanted)

    @property
    def likely_end(self) -> int:
        """Samples before this index are likely to be enough: if the others are kept as often as sampled ones.

        The rate is (kept + 1) / (sampled + 1), so that all are expected to be kept while none is sampled.
        """
        rate = (self.kept_N.sum() + 1) / (self.sampled_N.sum() + 1)
        expected_N = np.cumsum(np.where(self.sampled_N, self.kept_N, rate))
        # Rounded, since a sum such as 0.1 + 0.2 + ... may end just below the whole number.
        return min(int(np.searchsorted(np.round(expected_N, 6), self.wanted)) + 1, len(expected_N))

    @property
    def missing(self) -> npt.NDArray[np.int64]:
        """Indices of the samples that may be needed and are not sampled."""
        return np.flatnonzero(~self.sampled_N[: self.end])

    @property
    def kept(self) -> int:
        """The number of kept samples that are trained on."""
        return int(self.kept_N[: self.end].sum())


def _end(kept_N: Bools, wanted: int) -> int:
    """The index behind the last wanted one; N if there are fewer."""
    indices = np.flatnonzero(kept_N)
    return len(kept_N) if len(indices) < wanted else int(indices[wanted - 1]) + 1
