"""Measure how often a model answers the toy's question, slot by slot of the gold document.

The model generates greedily from the text of the prompt; an answer counts when its whole sentence is right. The same
questions are asked at every slot, so the slots differ in nothing but the place of the gold document.

Shapes: B prompts, T tokens of a prompt, S tokens of a prompt and its response.

Examples:
  python examples/toy/measure.py examples/toy/base
  python examples/toy/measure.py examples/toy/base --documents 30 --prompts 16
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from task import MAX_DOCUMENTS, MAX_EXAMPLES, Example, gold_at, make_example, user_message
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

# Away from the seeds that training data is generated with.
SEED = 1234


def prompt_ids(tokenizer: PreTrainedTokenizerBase, examples: list[Example], slot: int) -> Tensor:
    """Prompts with the gold document at `slot`: (B, T) token ids. All of them have one length, so nothing is padded."""
    messages = [user_message(gold_at(example["documents"], slot), example["question"]) for example in examples]
    chats = [[{"role": "user", "content": message}] for message in messages]
    return torch.tensor(tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))


def slot_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[Example], slot: int
) -> float:
    """Share of examples answered with exactly the gold document's sentence, that document standing at `slot`."""
    prompt_BT = prompt_ids(tokenizer, examples, slot)
    with torch.no_grad():
        ids_BS = model.generate(prompt_BT, do_sample=False, max_new_tokens=16)  # type: ignore[operator]
    responses = tokenizer.batch_decode(ids_BS[:, prompt_BT.shape[1] :], skip_special_tokens=True)
    wanted = [example["documents"][0]["text"] for example in examples]
    return sum(got.strip() == want for got, want in zip(responses, wanted, strict=True)) / len(examples)


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
    parser.add_argument("--documents", type=int, nargs="+", default=[20, 30, 40], help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=100, help="prompts a slot (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the examples (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    arguments = parser.parse_args()
    if not all(1 <= documents <= MAX_DOCUMENTS for documents in arguments.documents):
        parser.error(f"--documents must be 1 to {MAX_DOCUMENTS}, got {arguments.documents}")
    if not 1 <= arguments.prompts <= MAX_EXAMPLES:
        parser.error(f"--prompts must be 1 to {MAX_EXAMPLES}, got {arguments.prompts}")
    return arguments


def main() -> None:
    """Print one curve for every number of documents."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    for documents in arguments.documents:
        examples = [make_example(arguments.seed, index, documents) for index in range(arguments.prompts)]
        curve = [slot_accuracy(model, tokenizer, examples, slot) for slot in range(documents)]
        print(describe(curve), flush=True)


if __name__ == "__main__":
    main()
