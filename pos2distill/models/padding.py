"""Rows of different lengths as one rectangle of token ids.

Shapes: B rows, L tokens of the longest one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pos2distill.records import Tokens


def pad_left(rows: Sequence[Tokens | list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, (B, L) each. Padding is on the left, so that all rows end in the same column."""
    longest = max(map(len, rows))
    # Any id can serve as padding, since the mask hides it.
    input_ids_BL = torch.zeros(len(rows), longest, dtype=torch.long)
    attention_mask_BL = torch.zeros_like(input_ids_BL)
    for number, row in enumerate(rows):
        input_ids_BL[number, longest - len(row) :] = torch.from_numpy(np.asarray(row, np.int64))
        attention_mask_BL[number, longest - len(row) :] = 1
    return input_ids_BL, attention_mask_BL
