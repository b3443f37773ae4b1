"""Generated questions of key-value retrieval."""

from collections import Counter
from pathlib import Path

import pytest

from examples.smollm2.kv import main, make_record
from pos2distill.records import Example
from pos2distill.tasks.formats import parse_record
from pos2distill.tasks.readers import read_records


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["kv", *arguments])
    return main()


def test_make_record_asks_for_one_of_its_pairs() -> None:
    positions: Counter[int] = Counter()
    seen: set[str] = set()
    for index in range(300):
        record = make_record(seed=0, index=index, pairs=5)
        example = parse_record("kv", record, f"line {index + 1}")
        assert isinstance(example, Example)
        pairs = record["ordered_kv_records"]
        assert isinstance(pairs, list)
        positions[pairs.index([record["key"], record["value"]])] += 1
        seen |= {text for pair in pairs for text in pair}
    assert len(seen) == 300 * 5 * 2  # no key or value twice
    assert set(positions) == set(range(5))
    assert all(40 <= count <= 80 for count in positions.values())  # 60 are expected, three deviations are 21


def test_make_record_depends_on_its_index_and_seed_alone() -> None:
    assert make_record(seed=0, index=7, pairs=5) == make_record(seed=0, index=7, pairs=5)
    assert make_record(seed=0, index=7, pairs=5) != make_record(seed=1, index=7, pairs=5)
    assert make_record(seed=0, index=7, pairs=5) != make_record(seed=0, index=8, pairs=5)


def test_main_writes_the_same_bytes_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in ("one.jsonl.gz", "two.jsonl.gz")]
    for path in paths:
        assert run_main(monkeypatch, str(path), "--records", "4", "--pairs", "3") == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert [row for _, row in read_records(str(paths[0]))] == [make_record(0, index, 3) for index in range(4)]


def test_main_rejects_impossible_numbers_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, str(tmp_path / "kv.jsonl.gz"), "--pairs", "0")
    assert stop.value.code == 2
    assert "--pairs must be at least 1, got 0" in capsys.readouterr().err
    assert run_main(monkeypatch, str(tmp_path)) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: is a folder; expected the name of a file to write\n"
