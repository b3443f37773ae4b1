"""Measure a model's accuracy on a data file with plain transformers: closed-book, gold-only and by slot.

An answer is right if it occurs in the first line of the greedy response (`sub_em`). A response is cut if it has not
ended by itself at the limit of tokens. Slots count from 1.

Examples:
  python -m examples.smollm2.measure MODEL facts.jsonl.gz --documents 0
  python -m examples.smollm2.measure MODEL facts.jsonl.gz --documents 1
  python -m examples.smollm2.measure MODEL facts.jsonl.gz --documents 8 --slots 1 4 8 --examples 40
  python -m examples.smollm2.measure MODEL nq-open-oracle.jsonl.gz --format nq_oracle --documents 0 --examples 150
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.smollm2.errors import EXPECTED, report
from pos2distill.config import ModelSection
from pos2distill.config.formats import FORMATS, FormatName
from pos2distill.errors import UserError
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.records import Example
from pos2distill.tasks.formats import parse_record
from pos2distill.tasks.metrics import score
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.tasks.readers import read_records


def read_examples(path: Path, count: int, data_format: FormatName, documents: int) -> list[Example]:
    """The first `count` records of a file that its format does not skip (docs/data.md).

    Raises:
        UserError: if there are fewer, or one has fewer documents than are asked for.
    """
    examples: list[Example] = []
    for where, row in read_records(str(path)):
        if len(examples) == count:
            break
        example = parse_record(data_format, row, where)
        if not isinstance(example, Example):
            continue
        if len(example.documents) < documents:
            raise UserError(
                f"{path}, {where}: has {len(example.documents)} documents; expected {documents} (--documents)"
            )
        examples.append(example)
    if len(examples) < count:
        raise UserError(f"{path}: has {len(examples)} usable records; expected {count} (--examples)")
    return examples


def build_prompts(
    tokenizer: PreTrainedTokenizerBase, examples: list[Example], style: Literal["qa", "kv"], documents: int, slot: int
) -> list[list[int]]:
    """Token ids of one prompt for each example; without documents, the question alone.

    Args:
        style: the wording. slot: of the gold document, from 0.
    """
    if documents:
        build = PromptBuilder(tokenizer, style, max_length=8192, reserve=0)
        return [build(example, documents, (slot,)).tolist() for example in examples]
    prompts = []
    for example in examples:
        message = {"role": "user", "content": f"Question: {example.question}\nAnswer:"}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def generate(
    model: Any, tokenizer: Any, prompts: list[list[int]], *, max_new_tokens: int, batch_size: int
) -> tuple[list[str], int]:
    """The greedy response to each prompt, as text without the end-of-turn token, and how many of them were cut."""
    tokenizer.padding_side = "left"
    responses: list[str] = []
    ended = 0
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer.pad({"input_ids": prompts[start : start + batch_size]}, return_tensors="pt")
        with torch.inference_mode():
            output_BT = model.generate(
                **batch,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        response_BT = output_BT[:, batch["input_ids"].shape[1] :]
        ended += int((response_BT == tokenizer.eos_token_id).any(1).sum())
        responses += tokenizer.batch_decode(response_BT, skip_special_tokens=True)
    return responses, len(responses) - ended


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="folder of a model and its tokenizer")
    parser.add_argument("data", type=Path, help="data file, gzip or plain")
    parser.add_argument("--format", choices=FORMATS, default="jsonl", help="of the data (default: %(default)s)")
    parser.add_argument("--prompt", choices=["qa", "kv"], default="qa", help="wording (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--documents", type=int, default=1, help="0: closed-book (default: %(default)s)")
    parser.add_argument("--slots", type=int, nargs="+", default=[1], help="of the gold document (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=60, help="from the file's start (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--show", action="store_true", help="print every question, answer and response")
    arguments = parser.parse_args()
    if arguments.documents < 0:
        parser.error(f"--documents must be 0 (closed-book) or more, got {arguments.documents}")
    if not all(1 <= slot <= max(1, arguments.documents) for slot in arguments.slots):
        parser.error(f"--slots must be 1 to --documents ({arguments.documents}), got {arguments.slots}")
    for name in ("examples", "batch_size", "threads", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    return arguments


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, and its tokenizer.

    Raises:
        UserError: if the folder has no usable model or tokenizer.
    """
    section = ModelSection(path=str(folder), dtype="float32")
    return load_model(section), load_tokenizer(section)


def measure(arguments: argparse.Namespace) -> None:
    """Print one accuracy for each slot.

    Raises:
        UserError: if the data or the model cannot be used.
    """
    examples = read_examples(arguments.data, arguments.examples, arguments.format, arguments.documents)
    model, tokenizer = load(arguments.model)
    for slot in arguments.slots:
        started = time.monotonic()
        prompts = build_prompts(tokenizer, examples, arguments.prompt, arguments.documents, slot - 1)
        responses, cut = generate(
            model, tokenizer, prompts, max_new_tokens=arguments.max_new_tokens, batch_size=arguments.batch_size
        )
        right = 0
        for example, response in zip(examples, responses, strict=True):
            correct, _ = score("sub_em", response, example.answers)
            right += correct
            if arguments.show:
                print(f"{'right' if correct else 'wrong'} | {example.question} | {example.answers[0]} | {response!r}")
        mean_tokens = sum(map(len, prompts)) / len(prompts)
        print(
            f"{arguments.documents} documents, slot {slot}: {right} of {len(examples)} right "
            f"({right / len(examples):.2f}), {cut} cut; {mean_tokens:.0f} prompt tokens; "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )


def main() -> int:
    """Run the command line. Returns the exit code."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    try:
        measure(arguments)
    except EXPECTED as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
