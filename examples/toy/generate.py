"""Write examples of a toy task to a gzipped JSON-lines file.

The bytes depend on the arguments only: each example depends on (seed, index, documents), and the archive has no time
stamp.

Examples:
  python -m examples.toy.generate --examples 1500 --documents 40 --seed 0 --out examples/toy/data.jsonl.gz
  python -m examples.toy.generate --hops 2 --examples 1000 --out examples/toy/two_hop.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from examples.toy.task import MAX_DOCUMENTS, MAX_EXAMPLES, Example, make_example, make_two_hop_example


def write_examples(examples: Iterable[Example], path: Path) -> None:
    """Write one compact JSON object on each line. The same examples give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as archive:
        for example in examples:
            archive.write(json.dumps(example, separators=(",", ":")).encode() + b"\n")


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hops", type=int, choices=(1, 2), default=1, help="default: %(default)s")
    parser.add_argument("--examples", type=int, default=1500, help=f"1 to {MAX_EXAMPLES} (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=40, help=f"1 to {MAX_DOCUMENTS} (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="file to write, *.jsonl.gz")
    arguments = parser.parse_args()
    if not 1 <= arguments.examples <= MAX_EXAMPLES:
        parser.error(f"--examples must be 1 to {MAX_EXAMPLES}, got {arguments.examples}")
    if not 1 <= arguments.documents <= MAX_DOCUMENTS:
        parser.error(f"--documents must be 1 to {MAX_DOCUMENTS}, got {arguments.documents}")
    if arguments.documents % arguments.hops:
        parser.error(f"--documents must be even for two hops, got {arguments.documents}")
    return arguments


def main() -> None:
    """Write the file given on the command line."""
    arguments = parse_arguments()
    make = make_example if arguments.hops == 1 else make_two_hop_example
    examples = (make(arguments.seed, index, arguments.documents) for index in range(arguments.examples))
    write_examples(examples, arguments.out)
    print(f"{arguments.examples} examples, {arguments.out.stat().st_size:,} bytes: {arguments.out}")


if __name__ == "__main__":
    main()
