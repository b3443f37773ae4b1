import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.config import DataSection, MethodSection, ModelSection, Study, TrainingSection
from pos2distill.errors import UserError
from pos2distill.records import SAMPLE_SCHEMA, Document, Example
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import WINDOW, Action, Batch, BatchLoader, TrainingProgress, epoch_order

PER_BATCH = 3


def make_study(order: str = "arrival", epochs: int = 2) -> Study:
    return Study(
        model=ModelSection(path="nowhere"),
        data=DataSection(format="jsonl", path="nowhere", documents=4),
        method=MethodSection(k=1),
        training=TrainingSection(global_batch_rows=2 * PER_BATCH, epochs=epochs, order=order),  # type: ignore[arg-type]
        seed=3,
    )


def samples(indices: list[int], kept: set[int]) -> pa.Table:
    rows = []
    for index in indices:
        example = Example(f"e{index:04d}", "who?", ("me",), (Document("t", "me", 0), Document("u", "you")))
        rows.append(
            dict.fromkeys(SAMPLE_SCHEMA.names)
            | {
                "example_id": example.example_id,
                "example": asdict(example),
                "prompt_ids": [index],
                "response_ids": [index],
                "outcome": "kept" if index in kept else "wrong",
            }
        )
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


class Stream:
    """Parts that come one by one; each is in the store first, as the tee has it. None: nothing has come yet."""

    def __init__(self, store: SampleStore, parts: list[pa.Table | None], kept_back: int = 0) -> None:
        self.store, self.parts, self.kept_back = store, parts, kept_back
        self.polls = 0

    def poll(self) -> pa.Table | None:
        self.polls += 1
        if not self.parts:
            return None
        part = self.parts.pop(0)
        if part is None:
            return SAMPLE_SCHEMA.empty_table()
        self.store.append(part)
        # As Ray's split, which drops rows at its end: they are in the store and nowhere else.
        return part if self.parts else part.slice(0, max(0, len(part) - self.kept_back))


class World:
    """A store, and feeds on it."""

    def __init__(self, count: int, kept: set[int] | None = None) -> None:
        self.count = count
        self.kept = set(range(count)) if kept is None else kept
        self.ids = pa.array([f"e{index:04d}" for index in range(count)])
        self.store = SampleStore(Artifact(f"memory://{uuid.uuid4().hex}", "samples", "f"))
        self.store.open()

    def put(self, indices: list[int]) -> None:
        if indices:
            self.store.append(samples(indices, self.kept))

    def loader(
        self, study: Study, parts: list[list[int] | None] = [], kept_back: int = 0, **settings: Any
    ) -> BatchLoader:
        tables = [None if part is None else samples(part, self.kept) for part in parts]
        dist = settings.pop("dist", DistContext())
        return BatchLoader(study, self.ids, self.store, lambda: Stream(self.store, tables, kept_back), dist, **settings)


def trained(batches: Iterator[Batch]) -> list[list[int]]:
    """The kept examples of each batch, by their prompt's one token."""
    return [[int(sample.prompt_ids[0]) for sample in batch.samples] for batch in batches]


def all_of(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def drain(loader: BatchLoader, progress: TrainingProgress) -> list[Batch]:
    batches = []
    for batch in loader.batches(progress):
        progress.add(batch)
        batches.append(batch)
    return batches


# --- orders


@given(st.integers(1, 1500), st.integers(0, 5), st.integers(0, 3))
def test_an_epochs_order_is_a_permutation_and_a_pure_function(examples: int, seed: int, epoch: int) -> None:
    order = epoch_order(examples, seed, epoch)
    assert sorted(order.tolist()) == list(range(examples))
    assert order.tolist() == epoch_order(examples, seed, epoch).tolist()


def test_later_epochs_are_shuffled_each_in_its_own_way_window_by_window() -> None:
    first, second, third = (epoch_order(4 * WINDOW, 0, epoch) for epoch in (0, 1, 2))
    assert first.tolist() == list(range(4 * WINDOW))
    assert second.tolist() != third.tolist()
    assert epoch_order(4 * WINDOW, 1, 1).tolist() != second.tolist()
    for start in range(0, 4 * WINDOW, WINDOW):
        window = second[start : start + WINDOW]
        assert window.max() - window.min() == WINDOW - 1  # neighbours, which lie in the same parts of the store
        assert sorted(window) != window.tolist()


def test_one_order_is_pinned() -> None:
    """Changing this value changes every training run."""
    assert epoch_order(6, seed=0, epoch=1).tolist() == [5, 2, 3, 4, 0, 1]


# --- from the store


def test_every_kept_example_is_trained_on_once_an_epoch_in_whole_batches() -> None:
    world = World(10, kept={0, 1, 2, 4, 5, 7, 8, 9})
    world.put([3, 1, 4, 0, 5])
    world.put([9, 2, 6, 8, 7])
    batches = list(world.loader(make_study()).batches(TrainingProgress.at_start(10)))
    assert trained(iter(batches[:3])) == [[0, 1, 2], [4, 5, 7], [8, 9]]
    assert [batch.indices.tolist() for batch in batches[:3]] == [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]]
    assert sorted(all_of(trained(iter(batches[3:])))) == sorted(world.kept)
    assert [batch.share for batch in batches[:3]] == pytest.approx([0.15, 0.4, 0.5])
    assert batches[-1].share == pytest.approx(1)


def test_how_the_store_is_cut_does_not_matter() -> None:
    one, other = World(600), World(600)
    one.put(list(range(600)))
    for start in range(0, 600, 7):
        other.put(list(range(start, min(start + 7, 600)))[::-1])
    study = make_study()
    assert trained(one.loader(study).batches(TrainingProgress.at_start(600))) == trained(
        other.loader(study).batches(TrainingProgress.at_start(600))
    )


def test_nothing_kept_is_told() -> None:
    world = World(4, kept=set())
    world.put([0, 1, 2, 3])
    with pytest.raises(UserError, match="no sample was kept, so there is nothing to train on"):
        list(world.loader(make_study()).batches(TrainingProgress.at_start(4)))


# --- from the stream


def test_the_first_batch_comes_before_the_stream_has_ended() -> None:
    world = World(9)
    loader = world.loader(make_study(epochs=1), [[4, 2], None, [7, 0], [1, 3, 5, 6, 8]])
    batches = loader.batches(TrainingProgress.at_start(9))
    assert trained(iter([next(batches)])) == [[4, 2, 7]]
    assert len(world.store.part_names()) == 2
    assert trained(batches) == [[0, 1, 3], [5, 6, 8]]


def test_in_fixed_order_what_comes_early_waits() -> None:
    world = World(9)
    loader = world.loader(make_study("fixed", epochs=1), [[4, 2], None, [7, 0], [1, 3, 5, 6, 8]])
    assert trained(loader.batches(TrainingProgress.at_start(9))) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def shuffled_parts(count: int, seed: int) -> list[list[int] | None]:
    generator = np.random.default_rng(seed)
    cuts = np.sort(generator.choice(count, size=min(count, 6), replace=False))
    parts: list[list[int] | None] = [
        part.tolist() for part in np.split(generator.permutation(count), cuts) if len(part)
    ]
    parts.insert(int(generator.integers(len(parts))), None)
    return parts


@pytest.mark.parametrize("order", ["arrival", "fixed"])
@given(count=st.integers(1, 40), seed=st.integers(0, 10**6), data=st.data())
def test_exactly_once_whatever_is_stored_repeated_or_dropped(order: str, count: int, seed: int, data: Any) -> None:
    """Some samples are stored before, some come twice, and the stream's last rows are in the store alone."""
    kept = set(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    stored = data.draw(st.sets(st.integers(0, count - 1)))
    world = World(count, kept)
    world.put(sorted(stored))
    parts = shuffled_parts(count, seed)
    loader = world.loader(make_study(order), [*parts, *parts[:1]], kept_back=data.draw(st.integers(0, 3)))
    progress = TrainingProgress.at_start(count)
    batches = drain(loader, progress)
    for epoch in (0, 1):
        of_epoch = [batch for batch in batches if batch.epoch == epoch]
        assert sorted(all_of(trained(iter(of_epoch)))) == sorted(kept)
        assert sorted(index for batch in of_epoch for index in batch.indices) == list(range(count))
        assert all(len(batch.samples) == PER_BATCH for batch in of_epoch[:-1])
    assert progress.done.all()
    assert progress.step == sum(bool(batch.samples) for batch in batches)


@given(count=st.integers(4, 40), seed=st.integers(0, 10**6), stop=st.integers(1, 20))
def test_a_fixed_order_goes_on_after_any_batch_as_if_nothing_had_happened(count: int, seed: int, stop: int) -> None:
    kept = set(range(count)) - {1, 3}
    whole = World(count, kept)
    whole.put(list(range(count)))
    want = trained(whole.loader(make_study("fixed")).batches(TrainingProgress.at_start(count)))

    world, progress, got = World(count, kept), TrainingProgress.at_start(count), []
    for batch in world.loader(make_study("fixed"), shuffled_parts(count, seed)).batches(progress):
        progress.add(batch)
        got += trained(iter([batch]))
        if len(got) >= min(stop, len(want)):
            break
    missing = world.store.index(world.ids).missing.tolist()
    loader = world.loader(make_study("fixed"), [missing] if missing else [])
    got += trained(loader.batches(progress))
    assert got == want


@given(count=st.integers(4, 40), seed=st.integers(0, 10**6), stop=st.integers(1, 20))
def test_in_order_of_arrival_no_example_is_lost_or_repeated_by_a_restart(count: int, seed: int, stop: int) -> None:
    world, progress, got = World(count), TrainingProgress.at_start(count), []
    for batch in world.loader(make_study(epochs=1), shuffled_parts(count, seed)).batches(progress):
        progress.add(batch)
        got += trained(iter([batch]))
        if len(got) == stop:
            break
    missing = world.store.index(world.ids).missing.tolist()
    got += trained(world.loader(make_study(epochs=1), [missing] if missing else []).batches(progress))
    assert sorted(all_of(got)) == list(range(count))


def test_samples_that_never_come_are_a_bug_and_told_as_one() -> None:
    world = World(5)
    with pytest.raises(RuntimeError, match="2 examples are neither in the store nor did the stream bring them"):
        list(world.loader(make_study(), [[0, 1, 2]]).batches(TrainingProgress.at_start(5)))


def test_what_a_later_epoch_lacks_is_sampled_before_it_goes_on() -> None:
    """A part was found damaged and set aside: the stream brings it again, and the order is what it would have been."""
    world, whole = World(12), World(12)
    whole.put(list(range(12)))
    want = trained(whole.loader(make_study()).batches(TrainingProgress.at_start(12)))
    world.put([0, 1, 2, 3, 8, 9, 10, 11])
    progress = TrainingProgress(4, 1, np.zeros(12, bool))
    assert trained(world.loader(make_study(), [[4, 5], [6, 7]]).batches(progress)) == want[4:]


# --- wishes


def test_a_stop_ends_after_the_batch_it_was_wished_for() -> None:
    world = World(9)
    world.put(list(range(9)))
    wishes = {2: Action.STOP}
    loader = world.loader(make_study(), action=lambda step: wishes.get(step, Action.CONTINUE))
    batches = list(loader.batches(TrainingProgress.at_start(9)))
    assert [batch.action for batch in batches] == [Action.CONTINUE, Action.STOP]


def test_a_stop_does_not_wait_for_samples_and_leaves_half_a_batch_for_later() -> None:
    world = World(9)
    asked = iter([Action.CONTINUE, Action.STOP])
    loader = world.loader(make_study(), [[0, 1, 2, 3], None, [4, 5]], action=lambda _: next(asked))
    progress = TrainingProgress.at_start(9)
    batches = drain(loader, progress)
    assert trained(iter(batches)) == [[0, 1, 2], []]
    assert progress.done.tolist() == [True] * 3 + [False] * 6
    assert progress.step == 1


def test_a_checkpoint_that_falls_due_while_waiting_is_made_and_loses_nothing() -> None:
    world = World(9)
    asked = iter([Action.CONTINUE, Action.CHECKPOINT, Action.CONTINUE, Action.CONTINUE])
    loader = world.loader(make_study(epochs=1), [[0, 1, 2, 3], None, [4, 5], [6, 7, 8]], action=lambda _: next(asked))
    batches = drain(loader, TrainingProgress.at_start(9))
    assert [batch.action for batch in batches] == [Action.CONTINUE, Action.CHECKPOINT, Action.CONTINUE, Action.CONTINUE]
    assert trained(iter(batches)) == [[0, 1, 2], [], [3, 4, 5], [6, 7, 8]]


# --- dist


class Meeting(DistContext):
    """DistContext in threads of one process."""

    __slots__ = ()

    def all_gather_object(self, value: Any) -> list[Any]:
        values, barrier = self.control
        values[self.rank] = value
        barrier.wait()
        gathered = list(values)
        barrier.wait()
        return gathered


@pytest.mark.parametrize("order", ["arrival", "fixed"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_see_the_same_batches(order: str, world_size: int) -> None:
    """Each gets its own part of the stream, of another length and another pace; one wishes to stop late."""
    count = 40
    world = World(count, set(range(count)) - {5, 6})
    world.put([1, 2, 30])
    control = ([None] * world_size, threading.Barrier(world_size, timeout=30))
    shares: list[list[list[int] | None]] = [
        [[index] for index in range(count) if index % world_size == rank] for rank in range(world_size)
    ]
    shares[0] += [None, None]
    shares[1].insert(1, None)

    def run(rank: int) -> list[Batch]:
        loader = world.loader(make_study(order), shares[rank], dist=Meeting(rank, world_size, "cpu", control))
        return list(loader.batches(TrainingProgress.at_start(count)))

    with ThreadPoolExecutor(world_size) as pool:
        runs = list(pool.map(run, range(world_size)))
    batches = [trained(iter(each)) for each in runs]
    assert all(each == batches[0] for each in batches)
    assert sorted(all_of(batches[0])) == sorted(2 * sorted(world.kept))


def test_the_wish_of_any_rank_counts_for_all() -> None:
    world = World(9)
    world.put(list(range(9)))
    control = ([None] * 2, threading.Barrier(2, timeout=30))

    def run(rank: int) -> list[Action]:
        action: Callable[[int], Action] = lambda step: Action.CHECKPOINT if rank == 1 and step == 2 else Action.CONTINUE  # noqa: E731
        loader = world.loader(make_study(epochs=1), dist=Meeting(rank, 2, "cpu", control), action=action)
        return [batch.action for batch in loader.batches(TrainingProgress.at_start(9))]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[Action.CONTINUE, Action.CHECKPOINT, Action.CONTINUE]] * 2


def test_tables_travel_between_ranks_without_what_they_were_cut_from() -> None:
    table = samples(list(range(50)), set())
    control = ([None] * 2, threading.Barrier(2, timeout=30))

    def run(rank: int) -> list[pa.Table]:
        return list(Meeting(rank, 2, "cpu", control).all_gather_tables(table.slice(rank, 1) if rank else None))

    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(run, range(2)):
            assert [each["example_id"].to_pylist() for each in got] == [["e0001"]]
    sent = control[0][1]
    assert isinstance(sent, bytes)
    assert len(sent) < 20_000


# --- progress


def test_progress_survives_its_file(tmp_path: Path) -> None:
    progress = TrainingProgress(7, 1, np.array([True, False, True] * 5))
    progress.save(tmp_path)
    again = TrainingProgress.load(tmp_path)
    assert (again.step, again.epoch, again.done.tolist()) == (7, 1, progress.done.tolist())


def test_a_new_epoch_starts_with_nothing_done() -> None:
    progress = TrainingProgress(7, 0, np.array([True, True, True]))
    progress.add(Batch(1, np.array([2]), (), 0.7, Action.CONTINUE))
    assert (progress.step, progress.epoch, progress.done.tolist()) == (7, 1, [False, False, True])
