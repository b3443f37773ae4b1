"""Write a copy of the one-hop toy's data whose first answers are whole sentences, some of them wrong. For SFT.

SFT trains on the first answer of an example. The toy's own answers are bare ("87 57"); the model itself answers with
the gold document's sentence ("The code of Dark Viper is 87 57 ."), which becomes the first answer here. A wrong answer
holds the code of another document of the same example. Only training examples can get one, chosen by a hash of the
example's id, so that the evaluation stays the same as with the original data. The arguments determine every byte of the
file.

Example (from the project's top folder):
  python -m benchmarks.ablation.sentences --wrong 0.25 --out runs/ablation/wrong.jsonl.gz
"""

import argparse
import gzip
import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from pos2distill.config import DataSection
from pos2distill.config.load import load_recipe
from pos2distill.randomness import derive_generator
from pos2distill.tasks.datasets import load_split

RECIPE = "benchmarks/ablation/one_hop.yaml"


def training_ids(data: DataSection) -> Set[str]:
    """Ids of all records of the file that are on the training side of the split, used by the recipe or not."""
    one = data.model_copy(update={"train_examples": 1, "train_candidates": 1, "eval_examples": 1})
    count = load_split(one, documents=data.documents, seed=0).counts["train_unused"] + 1
    every = one.model_copy(update={"train_examples": count, "train_candidates": count})
    return {example.example_id for example in load_split(every, documents=data.documents, seed=0).train}


def with_sentence(record: dict[str, Any], wrong_fraction: float) -> dict[str, Any]:
    """The record with its gold document's sentence before the bare answer, or with a wrong sentence alone.

    Args:
        record: a record of the data file.
        wrong_fraction: the probability of a wrong sentence. It has the right name and another document's code.
    """
    gold = next(document for document in record["documents"] if document["gold"])
    generator = derive_generator(0, "wrong answer", record["id"])
    if generator.random() >= wrong_fraction:
        answers = [gold["text"], *record["answers"]]
    else:
        others = [document for document in record["documents"] if not document["gold"]]
        other = others[generator.integers(len(others))]
        answers = [other["text"].replace(other["title"], gold["title"])]
    return {**record, "answers": answers}


def main() -> None:
    """Read the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--wrong", type=float, default=0.0, help="fraction of training answers that are wrong (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write, *.jsonl.gz")
    arguments = parser.parse_args()
    data = load_recipe(RECIPE).study.data
    training = training_ids(data)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        gzip.open(data.path, "rt") as lines,
        arguments.out.open("wb") as raw,
        # Without a file name and a time in the header, so that the bytes are always the same.
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as archive,
    ):
        for line in lines:
            record = json.loads(line)
            wrong_fraction = 0.0
            if record["id"] in training:
                wrong_fraction = arguments.wrong
            changed = with_sentence(record, wrong_fraction)
            archive.write(json.dumps(changed, separators=(",", ":")).encode() + b"\n")


if __name__ == "__main__":
    main()
