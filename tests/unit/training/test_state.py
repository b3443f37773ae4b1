import errno
import io
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pos2distill.config import Recipe, TrainersSection
from pos2distill.config.training import STATE_BYTES
from pos2distill.errors import CorruptState, UserError
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.records import Tokens
from pos2distill.store.checkpoint_layout import STATE_FILE
from pos2distill.training import state
from pos2distill.training.state import KINDS, StoredState, write_state
from pos2distill.training.strategies.torch import TorchStrategy

TRAINERS = TrainersSection(strategy="torch", gradient_checkpointing=False)

URL = "s3://bucket/run/checkpoint-f00d/training/checkpoint_1"

# Odd sizes, so that parts of ranks end inside a row; more ranks than elements; no dimension at all.
SHAPES = {"embedding": (7, 5), "norm": (3,), "cube": (2, 3, 5), "scale": (), "bias": (1,)}


@pytest.fixture
def make_strategy(make_recipe: Callable[..., Recipe]) -> Callable[[str], TorchStrategy]:
    def make(precision: str = "float32", lora: dict[str, int] | None = None) -> TorchStrategy:
        training = {"precision": precision, "weight_decay": 0.1, "lora": lora}
        study = make_recipe(method={"name": "seqkd"}, training=training).study
        return TorchStrategy(study, TRAINERS, torch.device("cpu"), study.model)

    return make


def batch(number: int) -> ResponseBatch:
    random = np.random.default_rng(number)

    def draw(size: int) -> Tokens:
        return random.integers(5, 250, size).astype(np.int32)

    return collate([draw(size) for size in (9, 4, 12)], [draw(size) for size in (3, 5, 2)])


def steps(strategy: TorchStrategy, numbers: Sequence[int]) -> list[tuple[float, float]]:
    """(loss, norm) of one step a batch."""
    done = []
    for number in numbers:
        loss = strategy.forward(batch(number), None).mean()
        strategy.backward(loss, last=True)
        done.append((float(loss.detach()), strategy.step(3e-3 / (1 + number))))
    return done


def tensors(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}


def make_state(folder: Path, world_size: int = 2) -> dict[str, Tensor]:
    """A state as so many ranks write it. Returns its tensors."""
    random = torch.Generator().manual_seed(0)
    full = {f"{kind}/{name}": torch.randn(shape, generator=random) for name, shape in SHAPES.items() for kind in KINDS}
    for rank in range(world_size):
        write_state(
            folder, SHAPES, lambda kind, name: full[f"{kind}/{name}"], step=17, rank=rank, world_size=world_size
        )
    return full


# --- the torch strategy continues as if uninterrupted


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all", "lora"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_load_state_repeats_the_uninterrupted_run_bit_for_bit(
    make_strategy: Callable[..., TorchStrategy], tmp_path: Path, precision: str, lora: dict[str, int] | None
) -> None:
    strategy = make_strategy(precision, lora)
    steps(strategy, range(4))
    strategy.save_state(tmp_path / "at-4")
    uninterrupted = steps(strategy, range(4, 10))
    strategy.save_state(tmp_path / "at-10")

    resumed = make_strategy(precision, lora)
    steps(resumed, [99])  # whatever it did before is forgotten
    resumed.load_state(StoredState(tmp_path / "at-4", resumed.state_shapes(), URL))
    assert steps(resumed, range(4, 10)) == uninterrupted
    resumed.save_state(tmp_path / "again")
    want, got = tensors(tmp_path / "at-10"), tensors(tmp_path / "again")
    assert all(torch.equal(want[key], got[key]) for key in {**want, **got})
    assert StoredState(tmp_path / "again", resumed.state_shapes(), URL).step == 10


def test_load_state_resumes_from_before_the_first_step(
    make_strategy: Callable[..., TorchStrategy], tmp_path: Path
) -> None:
    strategy = make_strategy()
    strategy.save_state(tmp_path)
    first = steps(strategy, range(3))
    strategy.load_state(StoredState(tmp_path, strategy.state_shapes(), URL))
    assert steps(strategy, range(3)) == first == steps(make_strategy(), range(3))


def test_load_state_restores_moments_that_matter(make_strategy: Callable[..., TorchStrategy], tmp_path: Path) -> None:
    """Weights alone give another run: the test above would see a state without them."""
    strategy = make_strategy()
    steps(strategy, range(4))
    strategy.save_state(tmp_path)
    without = make_strategy()
    without.student.load_state_dict(strategy.student.state_dict())
    assert steps(without, range(4, 6)) != steps(strategy, range(4, 6))


# --- the files


@pytest.mark.parametrize("writers", [1, 2, 3, 8])
@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_stored_state_reads_what_any_number_of_ranks_wrote(tmp_path: Path, writers: int, readers: int) -> None:
    full = make_state(tmp_path, writers)
    stored = StoredState(tmp_path, SHAPES, URL)
    assert stored.step == 17
    for name, shape in SHAPES.items():
        count = math.prod(shape)
        size = -(-count // readers)
        edges = [min(rank * size, count) for rank in range(readers + 1)]
        for kind in KINDS:
            want = full[f"{kind}/{name}"]
            parts = [stored.read_flat(kind, name, *edge) for edge in itertools.pairwise(edges)]
            assert torch.equal(torch.cat(parts), want.flatten())
            assert torch.equal(stored.read(kind, name), want)
    for rank in range(readers):
        stored.verify(rank=rank, readers=readers)


def test_assign_files_divides_tensors_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor in one file; about the same bytes for each rank; no file too large, unless one tensor is."""
    monkeypatch.setattr(state, "_FILE_BYTES", 4 * 200)
    shapes = {f"layer.{number}": (4, 10 + number % 7) for number in range(60)} | {"large": (300,)}
    files_by_rank = state._assign_files(shapes, 4)
    assigned_keys = [key for files in files_by_rank for keys in files.values() for key in keys]
    assert sorted(assigned_keys) == sorted(f"{kind}/{name}" for name in shapes for kind in KINDS)
    totals = []
    for files in files_by_rank:
        sizes = [sum(math.prod(shapes[key.split("/")[1]]) for key in keys) for keys in files.values()]
        assert all(size == 300 or size <= 200 for size in sizes)
        totals.append(sum(sizes))
    assert max(totals) - min(totals) <= 3 * 300
    assert next(iter(files_by_rank[2])) == "state-00002-of-00004-000.safetensors"
    assert len({file for files in files_by_rank for file in files}) == sum(len(files) for files in files_by_rank)


def test_write_state_writes_every_tensor_to_several_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(state, "_FILE_BYTES", 64)
    full = make_state(tmp_path)
    written = tensors(tmp_path)
    assert written.keys() == full.keys()
    assert all(torch.equal(written[key], full[key]) for key in full)
    assert len(list(tmp_path.glob("*.safetensors"))) > 6


def test_write_state_writes_state_bytes_of_each_parameter(tmp_path: Path) -> None:
    """Checks of disks compute with this number before there is a state."""
    make_state(tmp_path)
    parameters = sum(math.prod(shape) for shape in SHAPES.values())
    assert sum(tensor.nbytes for tensor in tensors(tmp_path).values()) == STATE_BYTES * parameters


def test_write_state_never_holds_more_than_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file is written as soon as it has all its tensors."""
    monkeypatch.setattr(state, "_FILE_BYTES", 4 * 100)
    seen = []

    def gather(kind: str, name: str) -> Tensor:
        seen.append(len(list(tmp_path.glob("*.safetensors"))))
        return torch.zeros(10, 10)

    write_state(tmp_path, {f"layer.{n}": (10, 10) for n in range(4)}, gather, step=1, rank=0, world_size=1)
    assert seen == list(range(12))


# --- what cannot be used is named


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / STATE_FILE).read_text())
    change(content)
    (folder / STATE_FILE).write_text(json.dumps(content))


def test_stored_state_names_a_missing_state(tmp_path: Path) -> None:
    with pytest.raises(CorruptState, match=rf"^{URL}/{STATE_FILE}: missing$"):
        StoredState(tmp_path, SHAPES, URL)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}'])
def test_stored_state_names_corrupt_contents(tmp_path: Path, text: str) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(CorruptState, match=rf"^{URL}/{STATE_FILE}: corrupt \(.+\)$"):
        StoredState(tmp_path, SHAPES, URL)


def test_stored_state_rejects_another_format(tmp_path: Path) -> None:
    make_state(tmp_path)
    edit(tmp_path, lambda content: content.update(format=2))
    with pytest.raises(UserError, match="training state of format 2, expected 1: another version of this program"):
        StoredState(tmp_path, SHAPES, URL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": (4,)}, r"\(norm: \[3\]; this model: \[4\]\)"),
        ({"extra": (2,)}, r"\(extra: no such parameter; this model: \[2\]\)"),
    ],
)
def test_stored_state_rejects_another_model(tmp_path: Path, change: dict[str, tuple[int, ...]], message: str) -> None:
    make_state(tmp_path)
    with pytest.raises(UserError, match=rf"^{URL}/{STATE_FILE}: the state of another model {message}"):
        StoredState(tmp_path, SHAPES | change, URL)
    fewer = {name: shape for name, shape in SHAPES.items() if name != "bias"}
    with pytest.raises(UserError, match=r"\(bias: \[1\]; this model: no such parameter\)"):
        StoredState(tmp_path, fewer, URL)


def test_a_file_that_cannot_be_opened_for_now_is_neither_corrupt_nor_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a stale mount, or with too many open files. safetensors would say that there is none."""
    make_state(tmp_path)
    stored = StoredState(tmp_path, SHAPES, URL)
    opened = io.open

    def fail(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).endswith(".safetensors"):
            raise OSError(errno.ESTALE, "Stale file handle", file)
        return opened(file, *arguments, **options)

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(OSError, match="Stale"):
        stored.verify(rank=0, readers=2)


def test_stored_state_names_a_list_of_files_that_lacks_a_tensor(tmp_path: Path) -> None:
    make_state(tmp_path)
    edit(tmp_path, lambda content: next(iter(content["files"].values())).pop())
    with pytest.raises(CorruptState, match=rf"^{URL}/{STATE_FILE}: corrupt \('\w+/\w+'\)$"):
        StoredState(tmp_path, SHAPES, URL)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 4
    path.write_bytes(bytes(data))


def strip(path: Path) -> None:
    save_file({"weight/other": torch.zeros(1)}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "missing"),
        (cut, r"corrupt \(.+\)"),
        (flip, r"corrupt \(\w+/\w+ does not match its checksum\)"),
        (strip, r"corrupt \(.+\)"),
        (lambda path: path.write_bytes(b""), r"corrupt \(.+\)"),
    ],
)
def test_stored_state_names_a_corrupt_file(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    make_state(tmp_path)
    path = tmp_path / "state-00001-of-00002-000.safetensors"
    damage(path)
    stored = StoredState(tmp_path, SHAPES, URL)
    stored.verify(rank=0, readers=2)  # the other rank's files
    with pytest.raises(CorruptState, match=rf"^{URL}/{path.name}: {message}$"):
        stored.verify(rank=1, readers=2)
