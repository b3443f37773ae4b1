"""Write questions of key-value retrieval: random pairs of UUIDs, and one key whose value is asked for.

The records have the same fields as the files of Lost in the Middle (`data.format=kv`, docs/data.md), and are made in
the same way, but they are different records: report results on them under their own name. A record depends only on the
seed, its index and the number of pairs.

Example:
  python -m examples.smollm2.kv runs/kv.jsonl.gz --records 600 --pairs 20 --seed 0
"""

import argparse
import sys
from pathlib import Path
from random import Random
from uuid import UUID

from examples.smollm2.facts import write_counted
from pos2distill.randomness import derive_seed


def make_record(seed: int, index: int, pairs: int) -> dict[str, object]:
    """One record: its pairs, and the key and value of one of them, drawn evenly."""
    random = Random(derive_seed(seed, "key-value retrieval", index))
    drawn = [[_draw_uuid(random), _draw_uuid(random)] for _ in range(pairs)]
    key, value = random.choice(drawn)
    return {"ordered_kv_records": drawn, "key": key, "value": value}


def _draw_uuid(random: Random) -> str:
    return str(UUID(int=random.getrandbits(128), version=4))


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2.kv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="file to write, *.jsonl.gz")
    parser.add_argument("--records", type=int, default=600, help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=20, help="of each record (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    for name in ("records", "pairs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    return arguments


def main() -> int:
    """Write the file that the command line describes. Returns the exit code."""
    arguments = parse_arguments()
    records = (make_record(arguments.seed, index, arguments.pairs) for index in range(arguments.records))
    return write_counted(records, arguments.records, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
