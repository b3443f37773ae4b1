import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
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
from pos2distill.training.batches import Batch
from pos2distill.training.distributed import DistContext
from pos2distill.training.loader import BatchLoader
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.sample_tracker import SampleTracker
from pos2distill.training.sources import samples_left
from tests.support.ranks import run_threads, thread_ranks
from tests.support.tables import missing_in

PER_BATCH = 3
WANTED = 5
KEPT = {0, 2, 3, 6, 7, 8, 10}  # 7 of 12; the fifth is 7
SELECTED = [0, 2, 3, 6, 7]


def make_study(order: str = "arrival", epochs: int = 2, wanted: int = 300) -> Study:
    return Study(
        model=ModelSection(path="nowhere"),
        data=DataSection(format="jsonl", path="nowhere", documents=4, train_examples=wanted),
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
                "sample_id": example.example_id,
                "example": asdict(example),
                "slots": [0],
                "prompt_ids": [index],
                "response_ids": [index],
                "outcome": "kept" if index in kept else "wrong",
            }
        )
    return pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)


class Stream:
    """Parts that come one by one; each is stored before it comes, as in sampling. None: nothing new has come.

    dropped: rows at the end of the last part that do not come, as Ray's split drops some.
    """

    def __init__(self, store: SampleStore, parts: list[pa.Table | None], dropped: int = 0) -> None:
        self.store, self.parts, self.dropped = store, parts, dropped

    def poll(self) -> pa.Table | None:
        if not self.parts:
            return None
        part = self.parts.pop(0)
        if part is None:
            return SAMPLE_SCHEMA.empty_table()
        self.store.append(part)
        if self.parts:
            return part
        return part.slice(0, max(0, len(part) - self.dropped))


class World:
    """A store, and loaders that read it."""

    def __init__(self, count: int, kept: set[int] | None = None) -> None:
        self.count = count
        self.kept = set(range(count)) if kept is None else kept
        self.ids = pa.array([f"e{index:04d}" for index in range(count)])
        self.store = SampleStore(Artifact(f"memory://{uuid.uuid4().hex}", "samples", "f"))

    def put(self, indices: list[int]) -> None:
        if indices:
            self.store.append(samples(indices, self.kept))

    def loader(
        self, study: Study, parts: Sequence[list[int] | None] = (), dropped: int = 0, **settings: Any
    ) -> BatchLoader:
        tables = [None if part is None else samples(part, self.kept) for part in parts]
        dist = settings.pop("dist", DistContext())
        return BatchLoader(study, self.ids, self.store, lambda: Stream(self.store, tables, dropped), dist, **settings)


def trained(batches: Iterator[Batch]) -> list[list[int]]:
    """The kept samples of each batch, by their prompt's one token; without the empty batches of waiting."""
    return [[int(sample.teacher_prompt_ids[0]) for sample in batch.samples] for batch in batches if len(batch.indices)]


def all_of(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def drain(loader: BatchLoader, progress: TrainingProgress) -> list[Batch]:
    batches = []
    for batch in loader.batches(progress):
        progress.add(batch)
        batches.append(batch)
    return batches


# --- from the store


def test_batches_contain_every_kept_sample_once_an_epoch() -> None:
    world = World(10, kept={0, 1, 2, 4, 5, 7, 8, 9})
    world.put([3, 1, 4, 0, 5])
    world.put([9, 2, 6, 8, 7])
    batches = list(world.loader(make_study()).batches(TrainingProgress.at_start(10)))
    assert trained(iter(batches[:3])) == [[0, 1, 2], [4, 5, 7], [8, 9]]
    assert [batch.indices.tolist() for batch in batches[:3]] == [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]]
    assert sorted(all_of(trained(iter(batches[3:])))) == sorted(world.kept)
    assert [batch.fraction for batch in batches[:3]] == pytest.approx([0.15, 0.4, 0.5])
    assert batches[-1].fraction == pytest.approx(1)


def test_batches_do_not_depend_on_how_the_store_is_cut() -> None:
    one, other = World(600), World(600)
    one.put(list(range(600)))
    for start in range(0, 600, 7):
        other.put(list(range(start, min(start + 7, 600)))[::-1])
    study = make_study()
    assert trained(one.loader(study).batches(TrainingProgress.at_start(600))) == trained(
        other.loader(study).batches(TrainingProgress.at_start(600))
    )


def test_batches_raise_if_no_sample_was_kept() -> None:
    world = World(4, kept=set())
    world.put([0, 1, 2, 3])
    with pytest.raises(UserError, match="no sample was kept, so there is nothing to train on"):
        list(world.loader(make_study()).batches(TrainingProgress.at_start(4)))


# --- from the stream


def test_batches_start_before_the_stream_has_ended() -> None:
    world = World(9)
    loader = world.loader(make_study(epochs=1), [[4, 2], None, [7, 0], [1, 3, 5, 6, 8]])
    batches = loader.batches(TrainingProgress.at_start(9))
    assert trained(iter([next(batches), next(batches)])) == [[4, 2, 7]]
    assert len(world.store.part_names()) == 2
    assert trained(batches) == [[0, 1, 3], [5, 6, 8]]


def test_batches_in_fixed_order_wait_for_their_samples() -> None:
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
def test_batches_contain_each_sample_exactly_once_from_store_and_stream(
    order: str, count: int, seed: int, data: Any
) -> None:
    """Some samples are stored before, some come twice, and the stream's last rows are in the store alone."""
    kept = set(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    stored = data.draw(st.sets(st.integers(0, count - 1)))
    world = World(count, kept)
    world.put(sorted(stored))
    parts = shuffled_parts(count, seed)
    loader = world.loader(make_study(order), [*parts, *parts[:1]], dropped=data.draw(st.integers(0, 3)))
    progress = TrainingProgress.at_start(count)
    batches = drain(loader, progress)
    for epoch in (0, 1):
        of_epoch = [batch for batch in batches if batch.epoch == epoch and len(batch.indices)]
        assert sorted(all_of(trained(iter(of_epoch)))) == sorted(kept)
        assert sorted(index for batch in of_epoch for index in batch.indices) == list(range(count))
        assert all(len(batch.samples) == PER_BATCH for batch in of_epoch[:-1])
    assert progress.done.all()
    assert progress.step == sum(bool(batch.samples) for batch in batches)


@given(count=st.integers(4, 40), seed=st.integers(0, 10**6), stop=st.integers(1, 20))
def test_batches_in_fixed_order_resume_after_any_batch_unchanged(count: int, seed: int, stop: int) -> None:
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
    missing = missing_in(world.store.index(world.ids))
    loader = world.loader(make_study("fixed"), [missing] if missing else [])
    got += trained(loader.batches(progress))
    assert got == want


@given(count=st.integers(4, 40), seed=st.integers(0, 10**6), stop=st.integers(1, 20))
def test_batches_in_order_of_arrival_resume_without_losing_or_repeating_a_sample(
    count: int, seed: int, stop: int
) -> None:
    world, progress, got = World(count), TrainingProgress.at_start(count), []
    for batch in world.loader(make_study(epochs=1), shuffled_parts(count, seed)).batches(progress):
        progress.add(batch)
        got += trained(iter([batch]))
        if len(got) == stop:
            break
    missing = missing_in(world.store.index(world.ids))
    got += trained(world.loader(make_study(epochs=1), [missing] if missing else []).batches(progress))
    assert sorted(all_of(got)) == list(range(count))


def test_batches_raise_if_a_sample_never_arrives() -> None:
    world = World(5)
    with pytest.raises(RuntimeError, match="2 samples are neither in the store nor did the stream bring them"):
        list(world.loader(make_study(), [[0, 1, 2]]).batches(TrainingProgress.at_start(5)))


def test_batches_of_a_later_epoch_wait_for_what_the_store_lacks() -> None:
    """A part was corrupt and quarantined: the stream brings it again, and the order is what it would have been."""
    world, whole = World(12), World(12)
    whole.put(list(range(12)))
    want = trained(whole.loader(make_study()).batches(TrainingProgress.at_start(12)))
    world.put([0, 1, 2, 3, 8, 9, 10, 11])
    progress = TrainingProgress(4, 1, np.zeros(12, bool))
    assert trained(world.loader(make_study(), [[4, 5], [6, 7]]).batches(progress)) == want[4:]


# --- waiting


def test_batches_are_empty_while_waiting_and_lose_nothing() -> None:
    world = World(9)
    loader = world.loader(make_study(epochs=1), [[0, 1, 2, 3], None, [4, 5], [6, 7, 8]])
    batches = drain(loader, TrainingProgress.at_start(9))
    assert [len(batch.indices) for batch in batches] == [3, 0, 3, 3]
    assert trained(iter(batches)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_batches_are_not_empty_where_samples_came_that_may_not_be_needed() -> None:
    """Of 2 wanted, the samples 8 and 9 are held back; only the second part is a time of waiting."""
    world = World(12)
    loader = world.loader(make_study(epochs=1, wanted=2), [[8, 9], None, [0, 1]])
    batches = drain(loader, TrainingProgress.at_start(12))
    assert [batch.indices.tolist() for batch in batches] == [[], [0, 1]]


@pytest.mark.parametrize("order", ["arrival", "fixed"])
def test_batches_from_a_complete_store_are_never_empty(order: str) -> None:
    world = World(7)
    world.put(list(range(7)))
    batches = drain(world.loader(make_study(order)), TrainingProgress.at_start(7))
    assert [len(batch.indices) for batch in batches] == [3, 3, 1] * 2


def test_batches_not_taken_leave_a_partial_batch_for_later() -> None:
    world = World(9)
    progress = TrainingProgress.at_start(9)
    batches = world.loader(make_study(), [[0, 1, 2, 3], None, [4, 5]]).batches(progress)
    for batch in (next(batches), next(batches)):
        progress.add(batch)
    assert progress.done.tolist() == [True] * 3 + [False] * 6
    assert progress.step == 1


# --- several ranks


@pytest.mark.parametrize("order", ["arrival", "fixed"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_are_the_same_on_all_ranks(order: str, world_size: int) -> None:
    """Each gets its own part of the stream, of another length and another pace; one requested to stop late."""
    count = 40
    world = World(count, set(range(count)) - {5, 6})
    world.put([1, 2, 30])
    streams: list[list[list[int] | None]] = [
        [[index] for index in range(count) if index % world_size == rank] for rank in range(world_size)
    ]
    streams[0] += [None, None]
    streams[1].insert(1, None)

    def run(dist: DistContext) -> list[Batch]:
        loader = world.loader(make_study(order), streams[dist.rank], dist=dist)
        return list(loader.batches(TrainingProgress.at_start(count)))

    runs = run_threads(run, world_size)
    # Also the empty ones: after each batch, the ranks meet in collectives.
    indices = [[batch.indices.tolist() for batch in each] for each in runs]
    assert all(each == indices[0] for each in indices)
    batches = [trained(iter(each)) for each in runs]
    assert all(each == batches[0] for each in batches)
    assert sorted(all_of(batches[0])) == sorted(2 * sorted(world.kept))


@pytest.mark.parametrize("order", ["arrival", "fixed"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_samples_left_has_equally_many_lists_on_all_ranks(order: str, epoch: int) -> None:
    """Where one rank waits and the other does not, where both wait, and where what came may not be needed."""
    world = World(12, KEPT)
    streams: list[list[list[int] | None]] = [
        [[10, 11], None, None, [0, 3], None, [7, 8]],
        [None, None, [1], None, [2], [4, 5, 6, 9], None, None],
    ]

    def run(dist: DistContext) -> list[list[int]]:
        study = make_study(order, wanted=WANTED)
        tracker = SampleTracker(world.ids, world.store, WANTED, dist)
        tables = [None if part is None else samples(part, world.kept) for part in streams[dist.rank]]
        lists = samples_left(tracker, study, epoch, np.zeros(12, bool), lambda: Stream(world.store, tables))
        return [[indexed.index for indexed in each] for each in lists]

    first, second = run_threads(run, 2)
    assert first == second
    assert [] in first
    used = [index for index in chain.from_iterable(first) if index in world.kept]
    assert sorted(used) == SELECTED


def test_all_gather_tables_sends_slices_without_the_rest_of_their_table() -> None:
    table = samples(list(range(50)), set())
    ranks = thread_ranks(2)

    def run(dist: DistContext) -> list[pa.Table]:
        return list(dist.all_gather_tables(table.slice(1, 1) if dist.rank == 1 else None))

    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(run, ranks):
            assert [each["sample_id"].to_pylist() for each in got] == [["e0001"]]
    sent = ranks[0].sample_group.values[1]
    assert isinstance(sent, bytes)
    assert len(sent) < 20_000


# --- as many kept samples as are wanted


def test_batches_from_the_store_end_when_enough_are_kept() -> None:
    world = World(12, KEPT)
    world.put(list(range(11)))
    progress = TrainingProgress.at_start(12)
    batches = drain(world.loader(make_study(wanted=WANTED)), progress)
    assert trained(iter(batches))[:2] == [[0, 2, 3], [6, 7]]
    assert sorted(all_of(trained(iter(batches))[2:])) == SELECTED
    assert [batch.fraction for batch in batches] == pytest.approx([0.3, 0.5, 0.8, 1.0])


@pytest.mark.parametrize("order", ["arrival", "fixed"])
@pytest.mark.parametrize(
    "parts",
    [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[4, 5, 6, 7], None, [8, 9], [0, 1, 2, 3]],  # 8 is kept, but not among the first five
        [[10, 11], [2, 0], [3, 7, 8], [6, 1], [5], [4]],
    ],
)
def test_batches_of_a_stream_are_the_first_kept_ones(order: str, parts: list[list[int] | None]) -> None:
    """Whatever comes first: every selected example once, and no other one."""
    world = World(12, KEPT)
    batches = drain(world.loader(make_study(order, wanted=WANTED), parts), TrainingProgress.at_start(12))
    first, second = ([batch for batch in batches if batch.epoch == epoch] for epoch in (0, 1))
    for epoch in (first, second):
        assert sorted(all_of(trained(iter(epoch)))) == SELECTED
    if order == "fixed":
        assert all_of(trained(iter(first))) == SELECTED
    assert batches[-1].fraction == 1.0


def test_batches_of_a_stream_do_not_wait_for_what_is_certain() -> None:
    """Of 6 wanted, the first 6 samples are certain at once; the seventh when one of them is not kept."""
    world = World(12)
    world.kept = {0, 1, 2, 3, 4, 6, 7}
    batches = world.loader(make_study(wanted=6), [[3, 6], [4, 0], [1, 2], [5]]).batches(TrainingProgress.at_start(12))
    assert trained(batches)[:2] == [[3, 4, 0], [1, 2, 6]]


def test_batches_after_a_restart_take_up_the_selection() -> None:
    """Some are stored already, before and behind what is certain."""
    world = World(12, KEPT)
    world.put([0, 1, 7, 8])
    batches = drain(world.loader(make_study(wanted=WANTED), [[5, 6], [2, 3, 4]]), TrainingProgress.at_start(12))
    assert sorted(all_of(trained(iter([batch for batch in batches if batch.epoch == 0])))) == SELECTED


def test_batches_resume_within_an_epoch_of_the_selection() -> None:
    world = World(12, KEPT)
    study = make_study(wanted=WANTED, epochs=1)
    progress = TrainingProgress.at_start(12)
    first = next(world.loader(study, [[0, 1, 2, 3], [4, 5, 6, 7]]).batches(progress))
    progress.add(first)
    world.put([4, 5, 6, 7])
    rest = drain(world.loader(study), progress)
    assert sorted(all_of(trained(iter([first, *rest])))) == SELECTED
    assert rest[-1].fraction == 1.0
