"""R1 and its ablations in `transformers.Trainer`, for code bases that train with it: one process, no Ray, no store.

The loss is the pipeline's (`losses.kl`, `losses.objectives`), on one batch of whole examples: a test compares the two.
What the pipeline adds is a global batch of any number of workers and passes, a stored teacher, and exact resumption.

Shapes: E examples, N rows, L tokens of a padded row, R of the longest response, T response tokens of all rows, t of
them at once, H hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from pos2distill.config import MethodSection
from pos2distill.losses.kl import mean_by_row
from pos2distill.losses.objectives import ANCHOR, row_coefficients
from pos2distill.models.dropout import turn_dropout_off
from pos2distill.models.head import FrozenHead, LogitTransform
from pos2distill.models.loss_head import LossHead, compute_dtype
from pos2distill.models.padding import pad_left
from pos2distill.training.rows import RowBuilder, Sample
from pos2distill.training.student import response_losses
from pos2distill.training.teachers import FullDistribution

Feature = Mapping[str, Any]
"""One example: `prompts`, lists of token ids, one for each row; `slots`, the slot of the gold document in each of them,
ANCHOR (-1) for the first row, whose prompt was answered; `response`, the token ids of the answer."""


def to_feature(build: RowBuilder, sample: Sample) -> dict[str, Any]:
    """The feature of a pipeline's sample: its advantageous prompt, and K trivial ones.

    Raises:
        ValueError: if the sample holds another prompt than the one that was answered.
    """
    if build.study.method.teacher_gets_another_prompt:
        raise ValueError("samples of on-policy methods and of a random teacher_slot are for the pipeline only")
    rows = [build.row(key) for key in build.keys(sample)]
    trivial = [row for row in rows if row.slot_id != ANCHOR]
    return {
        "prompts": [sample.teacher_prompt_ids.tolist(), *(row.prompt_ids.tolist() for row in trivial)],
        "slots": [ANCHOR, *(row.slot_id for row in trivial)],
        "response": rows[0].response_ids.tolist(),
    }


def collate_examples(features: Sequence[Feature]) -> dict[str, Tensor]:
    """A batch of all rows of some examples, padded on the left, so that responses end in the same column.

    Returns: input_ids, attention_mask, position_ids (N, L); slots, anchor_rows (N,): the row that holds the answered
        prompt of the same example; response_mask (N, R): response tokens, aligned to the right.
    Raises:
        ValueError: if the first row of an example is not an anchor, or an example has no response.
    """
    rows: list[list[int]] = []
    slots: list[int] = []
    anchors: list[int] = []
    lengths: list[int] = []
    for number, feature in enumerate(features):
        if feature["slots"][0] != ANCHOR or not len(feature["response"]):
            raise ValueError(f"feature {number}: expected the answered prompt first (slot {ANCHOR}), and a response")
        anchor = len(rows)
        for prompt, slot in zip(feature["prompts"], feature["slots"], strict=True):
            rows.append([*prompt, *feature["response"]])
            slots.append(slot)
            anchors.append(anchor)
            lengths.append(len(feature["response"]))
    input_ids_NL, attention_mask_NL = pad_left(rows)
    columns_R = torch.arange(max(lengths))
    response_mask_NR = columns_R >= max(lengths) - torch.tensor(lengths)[:, None]
    return {
        "input_ids": input_ids_NL,
        "attention_mask": attention_mask_NL,
        "position_ids": (attention_mask_NL.cumsum(-1) - 1).clamp_min(0),
        "slots": torch.tensor(slots),
        "anchor_rows": torch.tensor(anchors),
        "response_mask": response_mask_NR,
    }


class PositionDistillTrainer(Trainer):
    """`transformers.Trainer` with the losses of the methods `r1`, `kl+align`, `kl`, `sft` and `seqkd`.

    Position weights are those of a whole batch, so a batch must be one update: `per_device_train_batch_size` examples
    in one process, without accumulation. The pipeline has no such limit.

    The model is trained without dropout, as in the pipeline: the weights follow from the divergence of two models, to
    which dropout would add its noise. Its dropout probabilities are set to 0 in place; its config keeps them.

    Args:
        method: names the loss, the row weights and lambda.
        teacher: the base model, for methods with a KL.
        arguments: the arguments of `transformers.Trainer`. The data set holds features (see `Feature`).
    Raises:
        ValueError: for settings under which the loss would be another one.
    """

    def __init__(
        self, *arguments: Any, method: MethodSection | None = None, teacher: PreTrainedModel | None = None, **named: Any
    ) -> None:
        self.method = method or MethodSection()
        if self.method.spec.on_policy:
            # A feature has one response, the answer to the advantageous prompt.
            raise ValueError(f"method '{self.method.name}' learns from an answer to each prompt, in the pipeline only")
        if (
            self.method.weights == "adaptive"
            or self.method.view != "none"
            or self.method.alignment != "shifted"
            or self.method.teacher_slot != "advantageous"
        ):
            raise ValueError(
                "adaptive weights, views, the official alignment and a random teacher_slot are for the pipeline only"
            )
        if self.method.loss == "kl" and teacher is None:
            raise ValueError(f"method '{self.method.name}' needs the base model as teacher")
        named.setdefault("data_collator", collate_examples)
        super().__init__(*arguments, **named)
        if self.args.gradient_accumulation_steps * self.args.world_size * max(1, self.args.n_gpu) != 1:
            raise ValueError(
                "position weights need the whole batch: use one process, one device and "
                "gradient_accumulation_steps=1, or the pipeline"
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("DeepSpeed and FSDP hold no whole output head, which the loss needs; use the pipeline")
        # The columns of features are not arguments of the model.
        self.args.remove_unused_columns = False
        self.label_names = ["slots"]
        assert self.model is not None
        _require_plain_head(self.model)
        turn_dropout_off(self.model)
        self.teacher = teacher
        if teacher is not None:
            _require_plain_head(teacher)
            teacher.requires_grad_(False).eval().to(self.args.device)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A model of `model_init`, without dropout. transformers 5.19 makes another one when training starts."""
        model: nn.Module = super().call_model_init(trial)
        _require_plain_head(model)
        turn_dropout_off(model)
        return model

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The sum of coefficient times row loss over the batch's rows; with outputs, also the row losses in nats."""
        mask_NR = inputs["response_mask"]
        # accelerate 1.15 does this for a call of the model, of which only the decoder is called here.
        with self.accelerator.autocast():
            loss_T = self._token_losses(self.accelerator.unwrap_model(model), inputs)
        loss_N = mean_by_row(loss_T, mask_NR.nonzero()[:, 0], len(mask_NR))
        detached_N = loss_N.detach()
        coefficient_N = row_coefficients(self.method, detached_N, torch.zeros_like(detached_N), inputs["slots"])
        loss = (coefficient_N * loss_N).sum()
        return (loss, {"row_losses": detached_N}) if return_outputs else loss

    def _token_losses(self, lm: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """The loss of each response token, (T,). Logits are float32 whatever the model's dtype, as in the pipeline."""
        mask_NR = inputs["response_mask"]
        hidden_TH = _response_states(lm, inputs)[mask_NR]
        teacher = None
        if self.method.loss == "kl":
            teacher = self._teacher_distribution(inputs, compute_dtype(hidden_TH))
        target_T = inputs["input_ids"][:, -mask_NR.shape[1] :][mask_NR]
        token_losses = response_losses(LogitTransform(lm.config), teacher, target_T)
        losses_T: Tensor = LossHead(lm.get_output_embeddings())(hidden_TH, token_losses=token_losses)
        return losses_T

    @torch.no_grad()
    def _teacher_distribution(self, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> FullDistribution:
        """For each row that of the base model at the answered prompt of its example. dtype: the student head's."""
        assert self.teacher is not None
        anchors_E, example_N = inputs["anchor_rows"].unique(return_inverse=True)
        answered = {name: value[anchors_E] for name, value in inputs.items()}
        hidden_TH = _response_states(self.teacher, answered)[example_N][inputs["response_mask"]]
        head: Any = self.teacher.get_output_embeddings()
        bias_V = getattr(head, "bias", None)
        frozen = FrozenHead(head.weight.to(dtype), bias_V, LogitTransform(self.teacher.config))
        return FullDistribution(hidden_TH, frozen, self.method.divergence)


def _require_plain_head(model: Any) -> None:
    """Reject an output head that is more than its weights, which are all that the loss uses of it.

    Raises:
        ValueError: as for the adapters of peft 0.21, which would be left out of the logits.
    """
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        return
    # Imported here: only models with adapters need peft.
    from pos2distill.models.lora import trained_layer

    head = trained_layer(head)
    if not isinstance(head, nn.Linear):
        found = f"{type(head).__module__}.{type(head).__name__}"
        raise ValueError(f"the output head is {found}, expected torch.nn.Linear: it takes no adapters here")


def _response_states(lm: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """(N, R, H): the states that enter the head and predict the last R tokens of every row."""
    longest = inputs["response_mask"].shape[1]
    output = lm.get_decoder()(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        position_ids=inputs["position_ids"],
        use_cache=False,
    )
    states: Tensor = output.last_hidden_state[:, -longest - 1 : -1]  # the last one predicts what follows the response
    return states
