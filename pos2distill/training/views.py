"""Other positions for the tokens of training rows, without a change of tokens or mask: RPSD's views, and PoSE.

RPSD (RoPE-perturbed self-distillation, arXiv:2604.14339) trains on a row as it is, and adds the divergence of the
model's distribution under a second view, whose RoPE positions are shifted, from that under the plain one. PoSE
(arXiv:2309.10400) trains under the skipped positions alone.

    skip, pose:  r_i = i for i < s, i + y for i >= s     s uniform in 0..L-1, y uniform in 1..L
    cyclic:      r_i = (i + u) mod M                     u uniform in 0..L-1

L: tokens of the teacher's prompt and the row's response. Rows of an example share the draw, and with it the positions
of a common prefix. They differ by some tokens, so M is a sixteenth more than L.

Shapes: S tokens of the packed sequence, T response tokens, B rows.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from pos2distill.models.packing import PositionView, ResponseBatch
from pos2distill.randomness import derive_generator
from pos2distill.training.rows import Row

Kind = Literal["skip", "cyclic", "pose"]

POSITIONS: dict[str, float] = {"skip": 2.0, "cyclic": 1.1, "pose": 2.0}
"""How many times the tokens of a row its positions need, by the kind of view."""


def view_of(rows: Sequence[Row], batch: ResponseBatch, kind: Kind, *, seed: int, epoch: int) -> PositionView:
    """The positions of a batch's tokens under a view, drawn for each example and epoch.

    It does not depend on how rows are cut into micro-batches.
    """
    draws = [_draw(row, kind, seed, epoch) for row in rows]
    # Each token belongs to the row that added it; a shared prefix has the same positions in all rows of its example.
    token_row_S = torch.repeat_interleave(torch.tensor(batch.packed.query_lengths))
    start_B, shift_B, modulus_B = torch.tensor(draws).T
    position_S = batch.position_S
    shifted_S = position_S + shift_B[token_row_S]
    if kind == "cyclic":
        view_S = shifted_S % modulus_B[token_row_S]
    else:
        view_S = torch.where(position_S >= start_B[token_row_S], shifted_S, position_S)
    # Before the skip nothing has changed, so there is nothing to compare.
    is_shifted_T = position_S[batch.logit_index_T] >= start_B[batch.row_T]
    return PositionView(view_S, is_shifted_T)


def _draw(row: Row, kind: Kind, seed: int, epoch: int) -> tuple[int, int, int]:
    """Where the shift begins, by how much, and the modulus (of `cyclic`)."""
    sample = row.sample
    length = len(sample.teacher_prompt_ids) + len(row.response_ids)
    generator = derive_generator(seed, "view", sample.example.example_id, epoch)
    if kind == "cyclic":
        return 0, int(generator.integers(length)), length + length // 16 + 1
    return int(generator.integers(length)), int(generator.integers(1, length + 1)), 0
