"""Hidden states of the frozen teacher at the response tokens, computed once for each kept sample.

The trainer multiplies them with the teacher's lm_head to get the exact logits. Hidden states of size 4096 in bfloat16
take 8 KB a token; bfloat16 logits over 128,000 words would take 256 KB.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pos2distill.config import ModelSection
from pos2distill.config.method import Alignment
from pos2distill.errors import UserError
from pos2distill.models.hidden_states import hidden_to_bytes, response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.memory import is_out_of_memory, model_must_fit
from pos2distill.models.packing import collate
from pos2distill.records import SAMPLE_SCHEMA, Tokens


class TeacherEncoder:
    """Computes the hidden states that lm_head gets at the positions that predict a response.

    Args:
        alignment: see `collate`.
        threads: number of torch's threads, on a CPU.
    """

    def __init__(
        self,
        model: ModelSection,
        *,
        alignment: Alignment,
        threads: int,
        device: str,
    ) -> None:
        torch.set_num_threads(threads)
        self.dtype = model.dtype
        self.alignment = alignment
        self.device = device
        with model_must_fit(
            f"{model.path}: the teacher does not fit in the memory of one GPU, or in its part of it "
            f"(runtime.teachers.gpus); set method.teacher to topk or resident, or use larger GPUs"
        ):
            self.model = load_model(model, device=device, packed=True)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Add the columns `hidden` and `hidden_dtype`: the states at the responses that are kept.

        Args:
            batch: a table of `RESPONSE_SCHEMA`.
        Raises:
            UserError: one row alone needs too much memory.
        """
        # Only kept responses are trained on, and hidden states are the largest part of a sample.
        kept_rows = np.flatnonzero(np.asarray(batch["outcome"]) == "kept")
        hidden: list[bytes | None] = [None] * len(batch)
        if len(kept_rows):
            prompts = [batch["prompt_ids"][int(row)].values.to_numpy() for row in kept_rows]
            responses = [batch["response_ids"][int(row)].values.to_numpy() for row in kept_rows]
            for row, hidden_TH in zip(kept_rows, self.encode(prompts, responses), strict=True):
                hidden[row] = hidden_to_bytes(hidden_TH)
        columns = {
            "hidden": hidden,
            "hidden_dtype": [self.dtype] * len(batch),
        }
        for name, values in columns.items():
            field = SAMPLE_SCHEMA.field(name)
            batch = batch.append_column(field, pa.array(values, field.type))
        return batch

    def encode(self, prompts: Sequence[Tokens], responses: Sequence[Tokens]) -> list[Tensor]:
        """A (T, H) tensor for each response of T tokens, in the model's dtype, on the CPU.

        If the rows together need too much memory, they are computed in halves.

        Raises:
            UserError: one row alone needs too much.
        """
        try:
            return self._forward(prompts, responses)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if len(prompts) == 1:
                raise UserError(
                    f"the teacher has too little memory for one row of {len(prompts[0]) + len(responses[0])} tokens; "
                    f"give it a larger GPU, or one of its own (runtime.teachers.gpus), or lower data.documents"
                ) from None
        half = len(prompts) // 2
        return self.encode(prompts[:half], responses[:half]) + self.encode(prompts[half:], responses[half:])

    @torch.inference_mode()
    def _forward(self, prompts: Sequence[Tokens], responses: Sequence[Tokens]) -> list[Tensor]:
        batch = collate(prompts, responses, alignment=self.alignment).to(self.device)
        hidden_TH = response_hidden_states(self.model, batch).cpu()
        return list(hidden_TH.split([len(response) for response in responses]))
