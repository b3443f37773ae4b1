"""Measure how often a model answers the toy's question, by the slots of its gold documents.

The model generates greedily from the text of the prompt; an answer counts when all of it is right, of two hops the
whole chain. The same questions are asked at every slot, so slots differ in nothing but the place of the gold documents.
One-hop questions are asked at all slots, two-hop questions at three kinds of pairs (slot of the first hop, slot of the
second): connected (i, i + 1), reversed (i + 1, i), and disconnected (i, j) with j > i + 1. The last connected pair
stands apart, as the advantageous one.

Shapes: B prompts, T tokens of a prompt, S tokens of a prompt and its response.

Examples:
  python examples/toy/measure.py examples/toy/base
  python examples/toy/measure.py examples/toy/base --documents 30 --prompts 16
  python examples/toy/measure.py examples/toy/two_hop_base --hops 2
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
from task import (
    MAX_DOCUMENTS,
    MAX_EXAMPLES,
    Example,
    gold_at,
    make_example,
    make_two_hop_example,
    response,
    user_message,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

# Away from the seeds that training data is generated with.
SEED = 1234
# Tokens of the longest right answer, of two hops, and some to go wrong in.
MAX_NEW_TOKENS = 32


def prompt_ids(tokenizer: PreTrainedTokenizerBase, examples: list[Example], slots: tuple[int, ...]) -> Tensor:
    """Prompts with the gold documents at `slots`: (B, T) token ids. All have one length, so nothing is padded."""
    messages = [user_message(gold_at(example["documents"], *slots), example["question"]) for example in examples]
    chats = [[{"role": "user", "content": message}] for message in messages]
    return torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))


def slot_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[Example], slots: tuple[int, ...]
) -> float:
    """Share of examples answered exactly right with their gold documents at `slots`, one for each hop."""
    prompt_BT = prompt_ids(tokenizer, examples, slots)
    with torch.no_grad():
        ids_BS = model.generate(prompt_BT, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)  # type: ignore[operator]
    answers = tokenizer.batch_decode(ids_BS[:, prompt_BT.shape[1] :], skip_special_tokens=True)
    right = [got.strip() == response(example) for got, example in zip(answers, examples, strict=True)]
    return sum(right) / len(examples)


def pairs_by_kind(documents: int) -> dict[str, list[tuple[int, int]]]:
    """0-based pairs of slots for two-hop questions, about ten of each kind, spread from the first slot to the last.

    Of fewer than 4 documents there is not a pair of each kind.
    """
    starts = _spread(documents - 1, 10)[:-1]
    apart = [(low, high) for low, high in itertools.combinations(_spread(documents, 5), 2) if high - low > 1]
    return {
        "last pair": [(documents - 2, documents - 1)],
        "connected": [(slot, slot + 1) for slot in starts],
        "disconnected": apart,
        "reversed": [(slot + 1, slot) for slot in [*starts, documents - 2]],
    }


def _spread(slots: int, count: int) -> list[int]:
    """At most `count` slots of 0 to slots - 1, evenly spread, both ends among them."""
    return sorted({round(part * (slots - 1) / (count - 1)) for part in range(count)})


def describe_pairs(documents: int, accuracy: dict[str, dict[tuple[int, int], float]]) -> str:
    """Accuracy by kind of pair as text: mean, then every pair, its slots counted from 1."""
    lines = [f"{documents} documents, two hops:"]
    for kind, of_pair in accuracy.items():
        lines.append(f"  {kind}: {sum(of_pair.values()) / len(of_pair):.3f}")
        cells = [f"({first + 1},{second + 1}) {value:.2f}" for (first, second), value in of_pair.items()]
        lines += ["    " + "  ".join(cells[start : start + 5]) for start in range(0, len(cells), 5)]
    return "\n".join(lines)


def describe(curve: list[float]) -> str:
    """A curve as text: its summary, then ten slots a line. GAP is best minus worst."""
    worst, best = min(curve), max(curve)
    mean = sum(curve) / len(curve)
    summary = f"mean {mean:.3f}, worst {worst:.2f}, best {best:.2f}, last {curve[-1]:.2f}, GAP {best - worst:.2f}"
    lines = [f"{len(curve)} documents: {summary}"]
    for start in range(0, len(curve), 10):
        cells = " ".join(f"{value:.2f}" for value in curve[start : start + 10])
        lines.append(f"  slots {start + 1:2d}-{min(start + 10, len(curve)):2d}  {cells}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model and its tokenizer")
    parser.add_argument("--hops", type=int, choices=(1, 2), default=1, help="default: %(default)s")
    parser.add_argument("--documents", type=int, nargs="+", default=[20, 30, 40], help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=100, help="prompts a slot (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the examples (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    if not all(1 <= documents <= MAX_DOCUMENTS for documents in arguments.documents):
        parser.error(f"--documents must be 1 to {MAX_DOCUMENTS}, got {arguments.documents}")
    if arguments.hops == 2 and not all(documents >= 4 and documents % 2 == 0 for documents in arguments.documents):
        parser.error(f"--documents must be even and at least 4 for two hops, got {arguments.documents}")
    if not 1 <= arguments.prompts <= MAX_EXAMPLES:
        parser.error(f"--prompts must be 1 to {MAX_EXAMPLES}, got {arguments.prompts}")
    return arguments


def main() -> None:
    """Print one curve, or one table of pairs, for every number of documents."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    for documents in arguments.documents:
        make = make_example if arguments.hops == 1 else make_two_hop_example
        examples = [make(arguments.seed, index, documents) for index in range(arguments.prompts)]
        if arguments.hops == 1:
            curve = [slot_accuracy(model, tokenizer, examples, (slot,)) for slot in range(documents)]
            print(describe(curve), flush=True)
        else:
            accuracy = {
                kind: {pair: slot_accuracy(model, tokenizer, examples, pair) for pair in pairs}
                for kind, pairs in pairs_by_kind(documents).items()
            }
            print(describe_pairs(documents, accuracy), flush=True)


if __name__ == "__main__":
    main()
