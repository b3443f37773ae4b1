"""Forward passes over one response at every evaluated placement: KL by token, and attention by document.

Shapes: S placements, T response tokens, V vocabulary, H hidden size; L tokens of a prompt, K of a row, P parts of it, D
documents, N layers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pos2distill.config import ModelSection, PoolSection, Study
from pos2distill.losses.kl import forward_kl
from pos2distill.models.architecture import torch_dtype
from pos2distill.models.attention_parts import states_and_attention
from pos2distill.models.head import FrozenHead
from pos2distill.models.hidden_states import hidden_from_bytes, hidden_to_bytes, response_hidden_states
from pos2distill.models.load import load_model, load_prompt_builder
from pos2distill.models.packing import collate
from pos2distill.records import PASSES_SCHEMA, Example, Slots, Tokens, example_from_row
from pos2distill.tasks.permutations import evaluated_placements
from pos2distill.tasks.prompts import AFTER, BEFORE

# Tokens of one forward pass, unless one row is longer. Results do not depend on it, up to rounding.
_PASS_TOKENS = 16_384


class PositionPasses:
    """Compares a model, at every evaluated placement, with the base model at the advantageous slot.

    Args:
        study: names the model that is analyzed, the wording of prompts and the placements.
        base: the base model; equal to the study's if that is the one analyzed.
        pool: settings of the actor that this runs in.
    """

    def __init__(self, study: Study, base: ModelSection, pool: PoolSection) -> None:
        torch.set_num_threads(pool.threads)
        model = study.model
        self.device = pool.device
        self.documents = study.data.documents
        self.placements = evaluated_placements(self.documents, study.data.hops, study.evaluation.slots)
        self.with_attention = study.analysis is not None and study.analysis.attention
        self.build = load_prompt_builder(study, reserve=study.evaluation.max_new_tokens)
        self.dtype = model.dtype
        self.lm = load_model(model, device=self.device, packed=True)
        self.head = FrozenHead.from_checkpoint(model, torch_dtype(model.dtype)).to(self.device)
        self.base_head = self.head
        if base != model:
            self.base_head = FrozenHead.from_checkpoint(base, torch_dtype(base.dtype)).to(self.device)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The passes over each response.

        Args:
            batch: columns `example_id`, `example`, `slots` and `response_ids`; where the model is not the base model
                also `hidden` and `hidden_dtype`.
        Returns: a table of `PASSES_SCHEMA`.
        """
        return pa.Table.from_pylist([self._passes(row) for row in batch.to_pylist()], schema=PASSES_SCHEMA)

    @torch.inference_mode()
    def _passes(self, row: dict[str, Any]) -> dict[str, Any]:
        example = example_from_row(row["example"])
        response = np.asarray(row["response_ids"], np.int32)
        all_slots = [placement.slots for placement in self.placements[len(example.golds)]]
        if row.get("hidden") is None:
            (base_TH,), _ = self._forward(example, [tuple(row["slots"])], response)
            row = {**row, "hidden": hidden_to_bytes(base_TH.cpu()), "hidden_dtype": self.dtype}
        base_TH = hidden_from_bytes(row["hidden"], row["hidden_dtype"], len(response)).to(self.device)
        base_TV = self.base_head(base_TH)
        tokens_T = base_TV.argmax(-1)
        kl_ST, agrees_ST = [], []
        states, sums = self._forward(example, all_slots, response)
        for hidden_TH in states:
            # One placement after the other: logits of all would be S times as large.
            logits_TV = self.head(hidden_TH)
            kl_ST.append(forward_kl(base_TV, logits_TV).tolist())
            agrees_ST.append((logits_TV.argmax(-1) == tokens_T).tolist())
        # As `QUERIES` names them: the mean over the predicting positions, and the first of them, the last token of the
        # prompt.
        attention_SN2P = [torch.stack([sums_NTP.mean(1), sums_NTP[:, 0]], 1) for sums_NTP in sums]
        return {
            **row,
            "tokens": tokens_T.tolist(),
            "placement_slots": all_slots,
            "kl": kl_ST,
            "agrees": agrees_ST,
            "layers": len(attention_SN2P[0]) if attention_SN2P else 0,
            "attention": [attention_N2P.flatten().tolist() for attention_N2P in attention_SN2P],
        }

    def _forward(
        self, example: Example, all_slots: Sequence[Slots], response: Tokens
    ) -> tuple[list[Tensor], list[Tensor]]:
        """For each placement the states (T, H) that predict the response, and with attention its sums (N, T, P)."""
        prompts: list[Tokens] = []
        parts: list[Tensor] = []
        for slots in all_slots:
            if self.with_attention:
                prompt, part_L = self.build.locate(example, self.documents, slots)
                parts.append(self._number_parts(part_L, len(response)))
            else:
                prompt = self.build(example, self.documents, slots)
            prompts.append(prompt)
        states: list[Tensor] = []
        sums: list[Tensor] = []
        rows = max(1, _PASS_TOKENS // (max(map(len, prompts)) + len(response)))
        for start in range(0, len(prompts), rows):
            group = prompts[start : start + rows]
            # One group, so that common beginnings of the prompts are computed once.
            batch = collate(group, [response] * len(group), group_ids=[0] * len(group)).to(self.device)
            if self.with_attention:
                part_K = parts[start : start + rows]
                hidden, sums_of_rows = states_and_attention(self.lm, batch, part_K, self.documents + 3)
                sums += sums_of_rows
            else:
                hidden = response_hidden_states(self.lm, batch)
            states += hidden.split(len(response))
        return states, sums

    def _number_parts(self, part_L: Tokens, response: int) -> Tensor:
        """(K,) the part of each token of a row: D documents, then before, after, response."""
        before, after, answer = range(self.documents, self.documents + 3)
        part_L = np.where(part_L == BEFORE, before, np.where(part_L == AFTER, after, part_L))
        return torch.from_numpy(np.concatenate([part_L, np.full(response, answer)])).long()
