"""Train the toy's base model: retrieval over at most 8 documents, no position preferred.

With 20 to 40 documents, more than in any training prompt, the model fails on documents far from the question. The
training data does not cause this position bias; the quickstart reduces it. About five minutes on one CPU core.

Examples:
  python -m examples.toy.train_base --seed 0 --out examples/toy/base
  python run.py evaluate quickstart evaluation.slots=all   # the accuracy at every slot
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaForCausalLM

from examples.toy.batches import FIRST_NUMBER_ID, LAST_NUMBER_ID, sequence_length, training_batch
from examples.toy.model import build_model, save
from examples.toy.task import VOCABULARY

TOKENS_PER_STEP = 2048
QUESTIONS_PER_CONTEXT = 3
COPY_WEIGHT = 0.1
WARMUP_STEPS = 50
DATA_SEEDS = 1_000_000  # reserved for each training seed; larger than the number of steps


@dataclass
class Curriculum:
    """Number of documents in a context: up to `most`, which grows from 2 to `limit` as the model learns."""

    limit: int
    most: int = 2
    accuracy: float | None = None  # running mean over the steps with `most` documents
    steps_since_growth: int = 0

    def draw(self, generator: torch.Generator) -> int:
        """Half of the steps have `most` documents, the others a uniform number from 2."""
        if torch.rand((), generator=generator) < 0.5:
            return self.most
        return int(torch.randint(2, self.most + 1, (), generator=generator))

    def record(self, documents: int, accuracy: float) -> None:
        """Update the accuracy with one step's; above 0.9, increase `most` by half."""
        self.steps_since_growth += 1
        if documents == self.most:
            self.accuracy = accuracy if self.accuracy is None else 0.9 * self.accuracy + 0.1 * accuracy
        solved = self.accuracy is not None and self.accuracy > 0.9
        if solved and self.steps_since_growth >= 20 and self.most < self.limit:
            self.most = min(self.limit, self.most + self.most // 2)
            self.accuracy, self.steps_since_growth = None, 0


def learning_rate(step: int, peak: float, *, left: int | None, last_steps: int) -> float:
    """Linear warm-up, constant until the curriculum is finished, then linear decay to a twentieth.

    Args:
        step: from 0.
        peak: the constant learning rate.
        left: remaining steps; None while the curriculum grows, because the number is not known yet.
        last_steps: initial value of `left`.
    """
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    decay = 1.0 if left is None else max(0.05, left / last_steps)
    return peak * (warmup * decay)


def build_optimizers(model: LlamaForCausalLM, rate: float) -> tuple[Optimizer, Optimizer]:
    """Muon for the weight matrices of the layers, AdamW for embeddings, norms and biases."""
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=rate, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return muon, AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)


def weighted_loss(model: LlamaForCausalLM, ids_BT: Tensor, weight_BT: Tensor) -> tuple[Tensor, float]:
    """Cross-entropy of the next token, averaged with the batch's weights.

    Returns: the loss in nats, and the accuracy on code numbers in responses (fraction whose argmax is correct).
    """
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    target_BT, weight_BT = ids_BT[:, 1:], weight_BT[:, 1:]
    counted_BT = weight_BT > 0
    # N: the tokens of the batch that have a weight.
    logits_NV, target_N, weight_N = logits_BTV[counted_BT].float(), target_BT[counted_BT], weight_BT[counted_BT]
    loss = (cross_entropy(logits_NV, target_N, reduction="none") * weight_N).sum() / weight_N.sum()
    code_N = (weight_N == 1) & (target_N >= FIRST_NUMBER_ID) & (target_N <= LAST_NUMBER_ID)
    correct_N = logits_NV.argmax(-1) == target_N
    return loss, correct_N[code_N].float().mean().item()


def apply_step(loss: Tensor, optimizers: tuple[Optimizer, Optimizer], rate: float) -> None:
    """One update of both optimizers. Muon's updates have a fixed size, so only AdamW's gradients are clipped."""
    loss.backward()
    _, adamw = optimizers
    torch.nn.utils.clip_grad_norm_(adamw.param_groups[0]["params"], 1.0)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def train(model: LlamaForCausalLM, *, seed: int, most_steps: int, last_steps: int, documents: int, peak: float) -> None:
    """Train in place until the curriculum reaches `documents` documents, then `last_steps` more with a decaying rate.

    The data of a step depends on (seed, step, most documents allowed). A context has more documents than questions:
    with questions about both of two documents, a model finds the second answer by elimination, and learns only that.

    Raises: SystemExit if the curriculum does not reach `documents` documents within `most_steps`.
    """
    optimizers = build_optimizers(model, peak)
    curriculum = Curriculum(limit=documents)
    left: int | None = None
    started = time.monotonic()
    for step in range(most_steps + last_steps):
        if left is None and curriculum.most == documents:
            left = last_steps
        if left == 0 or (left is None and step == most_steps):
            break
        generator = torch.Generator().manual_seed(seed * DATA_SEEDS + step)
        shown = curriculum.draw(generator)
        questions = min(QUESTIONS_PER_CONTEXT, shown - 1)
        sequences = max(4, TOKENS_PER_STEP // sequence_length(shown, questions))
        ids_BT, weight_BT = training_batch(sequences, shown, questions, copy_weight=COPY_WEIGHT, generator=generator)
        loss, accuracy = weighted_loss(model, ids_BT, weight_BT)
        apply_step(loss, optimizers, learning_rate(step, peak, left=left, last_steps=last_steps))
        curriculum.record(shown, accuracy)
        left = None if left is None else left - 1
        if (step + 1) % 100 == 0:
            known = "-" if curriculum.accuracy is None else f"{curriculum.accuracy:.2f}"
            print(
                f"step {step + 1}  {time.monotonic() - started:.0f} s  loss {loss.item():.3f}  "
                f"up to {curriculum.most} documents, accuracy there {known}"
                + ("" if left is None else f", {left} left"),
                flush=True,
            )
    if left is None:
        reached = f"seed {seed} reached {curriculum.most} of {documents} documents in {most_steps} steps"
        raise SystemExit(f"{reached}; try another --seed or more --steps")


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=2000, help="most steps until it reaches --documents (default: %(default)s)"
    )
    parser.add_argument("--last-steps", type=int, default=500, help="steps after that (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument(
        "--documents", type=int, default=8, help="most documents of a training prompt (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="the weights depend on it (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    return parser.parse_args()


def main() -> None:
    """Train and save a model."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    model = build_model(arguments.seed)
    train(
        model,
        seed=arguments.seed,
        most_steps=arguments.steps,
        last_steps=arguments.last_steps,
        documents=arguments.documents,
        peak=arguments.rate,
    )
    save(model, arguments.out, VOCABULARY)
    print(f"saved {sum(weight.numel() for weight in model.parameters()):,} parameters: {arguments.out}")


if __name__ == "__main__":
    main()
