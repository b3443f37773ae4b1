"""Train the toy's base model on two-hop questions: a second phase, again with at most 8 documents.

The model learns to follow a chain, `The mentor of X is Y . The code of Y is 48 72 . The answer is: 48 72`, and keeps
answering one-hop questions. As in the first phase, questions are about documents at uniformly random slots, so the
training data does not cause the position bias over 20 to 40 documents. A few minutes on one CPU core.

Examples:
  python -m examples.toy.train_two_hop --seed 0 --out examples/toy/two_hop_base
  python run.py evaluate quickstart_r2   # the accuracy by pairs of slots
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from examples.toy.batches import Kind, sequence_length, training_batch
from examples.toy.model import save
from examples.toy.task import TWO_HOP_VOCABULARY
from examples.toy.train_base import (
    COPY_WEIGHT,
    DATA_SEEDS,
    QUESTIONS_PER_CONTEXT,
    apply_step,
    build_optimizers,
    learning_rate,
    weighted_loss,
)

TOKENS_PER_STEP = 4096
# Fraction of the steps of each kind. One-hop questions remain, so that the model does not forget them.
KIND_FRACTIONS: dict[Kind, float] = {"one hop": 0.4, "mixed": 0.25, "two hops": 0.35}
# The learning rate is constant, then decays over this fraction of the steps.
DECAY_FRACTION = 0.3


def load_with_new_words(folder: Path, seed: int) -> LlamaForCausalLM:
    """The base model with the words of two-hop questions added; the existing words keep their embeddings.

    Sets torch's global seed; the new embeddings are drawn from it like those of a new model.
    """
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(seed)
    model.resize_token_embeddings(len(TWO_HOP_VOCABULARY), mean_resizing=False)
    return model


def draw_shape(most: int, generator: torch.Generator) -> tuple[Kind, int, int]:
    """Kind, documents and questions of one step; half of the steps have the most documents allowed.

    A context has at least two chains, and at least one chain has no question. If there were only one chain, or only one
    left, the model could answer without reading the question.
    """
    fractions = torch.tensor(list(KIND_FRACTIONS.values()))
    kind = list(KIND_FRACTIONS)[int(torch.multinomial(fractions, 1, generator=generator))]
    if kind == "one hop":
        documents = int(torch.randint(2, most + 1, (), generator=generator))
    else:
        documents = 2 * int(torch.randint(2, most // 2 + 1, (), generator=generator))
    if torch.rand((), generator=generator) < 0.5:
        documents = most
    subjects = documents // 2 if kind == "two hops" else documents
    return kind, documents, min(QUESTIONS_PER_CONTEXT, subjects - 1)


def train(model: LlamaForCausalLM, *, seed: int, steps: int, documents: int, peak: float) -> None:
    """Train in place. The data of a step depends on (seed, step, most documents allowed)."""
    optimizers = build_optimizers(model, peak)
    decay_steps = max(1, round(DECAY_FRACTION * steps))
    accuracy: dict[Kind, float] = {}
    started = time.monotonic()
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed * DATA_SEEDS + step)
        kind, shown, questions = draw_shape(documents, generator)
        sequences = max(4, TOKENS_PER_STEP // sequence_length(shown, questions, kind))
        ids_BT, weight_BT = training_batch(
            sequences, shown, questions, copy_weight=COPY_WEIGHT, generator=generator, kind=kind
        )
        loss, accuracy[kind] = weighted_loss(model, ids_BT, weight_BT)
        left = min(decay_steps, steps - step)
        apply_step(loss, optimizers, learning_rate(step, peak, left=left, last_steps=decay_steps))
        if (step + 1) % 100 == 0:
            last = ", ".join(f"{kind} {accuracy[kind]:.2f}" for kind in KIND_FRACTIONS if kind in accuracy)
            print(f"step {step + 1}  {time.monotonic() - started:.0f} s  last accuracy: {last}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base", type=Path, default=Path(__file__).parent / "base", help="one-hop model (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of new words and the data (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=8, help="most documents, even (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="the weights depend on it (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    arguments = parser.parse_args()
    if arguments.documents < 4 or arguments.documents % 2:
        parser.error(f"--documents must be even and at least 4 (two chains), got {arguments.documents}")
    return arguments


def main() -> None:
    """Train and save a model."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    model = load_with_new_words(arguments.base, arguments.seed)
    train(model, seed=arguments.seed, steps=arguments.steps, documents=arguments.documents, peak=arguments.rate)
    save(model, arguments.out, TWO_HOP_VOCABULARY)
    print(f"saved {sum(weight.numel() for weight in model.parameters()):,} parameters: {arguments.out}")


if __name__ == "__main__":
    main()
