"""The teacher stage: the frozen model's hidden states at the response, once an example.

The trainer recovers exact logits from them with the initial lm_head: 8 KB a token at H = 4096 instead of 256 KB.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pos2distill.config import ModelSection
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import collate
from pos2distill.records import Tokens


class TeacherEncoder:
    """Computes the states that enter lm_head at the positions that predict a response."""

    def __init__(
        self,
        model: ModelSection,
        *,
        alignment: Literal["shifted", "official"] = "shifted",
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        torch.set_num_threads(threads)
        self.alignment = alignment
        self.device = device
        self.model = load_model(model, device=device, packed=True)

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[Tokens], responses: Sequence[Tokens]) -> list[Tensor]:
        """One (T, H) tensor a row, in the model's dtype, on the CPU."""
        batch = collate(prompts, responses, alignment=self.alignment).to(self.device)
        hidden_TH = response_hidden_states(self.model, batch).cpu()
        return list(hidden_TH.split([len(response) for response in responses]))
