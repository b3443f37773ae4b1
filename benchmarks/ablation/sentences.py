"""Write the one-hop toy with the model's own sentence as its first answer, for SFT, and a share of wrong ones.

SFT trains on an example's first answer. On "The code of Dark Viper is 87 57 ." it learns what to say and not how to
say it. A wrong answer names the code of another document of the example; training questions alone get one, by a
hash of the question's id, so that evaluation is the clean task's. The bytes are a function of the arguments.

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
    """Ids of all the file's questions on the side of training."""
    few = data.model_copy(update={"train_examples": 1, "eval_examples": 1})
    count = load_split(few, documents=data.documents, seed=0).counts["train_unused"] + 1
    every = few.model_copy(update={"train_examples": count})
    return {example.example_id for example in load_split(every, documents=data.documents, seed=0).train}


def with_sentence(row: dict[str, Any], wrong_share: float) -> dict[str, Any]:
    """The row with its gold document's sentence before its short answer; a share of rows, with a wrong one alone.

    Args:
        wrong_share: of the rows whose answer is taken from another document, the name in it kept.
    """
    gold = next(document for document in row["documents"] if document["gold"])
    generator = derive_generator(0, "wrong answer", row["id"])
    if generator.random() >= wrong_share:
        return row | {"answers": [gold["text"], *row["answers"]]}
    others = [document for document in row["documents"] if not document["gold"]]
    other = others[generator.integers(len(others))]
    return row | {"answers": [other["text"].replace(other["title"], gold["title"])]}


def main() -> None:
    """Read the arguments, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", type=float, default=0.0, help="share of training answers (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="file to write, *.jsonl.gz")
    arguments = parser.parse_args()
    data = load_recipe(RECIPE).study.data
    training = training_ids(data)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        gzip.open(data.path, "rt") as lines,
        arguments.out.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as archive,
    ):
        for row in map(json.loads, lines):
            changed = with_sentence(row, arguments.wrong if row["id"] in training else 0.0)
            archive.write(json.dumps(changed, separators=(",", ":")).encode() + b"\n")


if __name__ == "__main__":
    main()
