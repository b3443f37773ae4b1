"""A law: whatever happens after any step of a study, running it again gives the same result, bit for bit.

On the local executor, whose steps take milliseconds, so that every step can be the one. Real processes are killed in
the slow tier.
"""

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.executors.local import LocalSession
from pipelines.plan import make_plan
from pipelines.run_coordinator import RunCoordinator
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import Stopped, UserError
from pos2distill.store.artifacts import Artifact
from pos2distill.store.parts import TableParts
from tests.support.commands import run_distill, run_evaluate, run_sample, run_study
from tests.support.paths import ODD_NAME
from tests.support.results import saved_states, step_of_state

EPOCHS = 2
STEPS = 8  # 8 examples, 2 in a batch, in 2 epochs


class Killed(BaseException):
    """Ends a run as a crash would: nothing catches it, and no checkpoint is written."""


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe]) -> Recipe:
    return make_recipe(
        training={"global_batch_rows": 8, "epochs": EPOCHS, "order": "fixed"},
        runtime={"executor": "local", "checkpoints": {"steps": 3}, "samplers": {"batch_size": 2}},
    )


def at_storage(tmp_path: Path, storage: Path) -> Recipe:
    return load_recipe(str(tmp_path / "recipe.yaml"), [f"runtime.storage={storage}"])


def results(recipe: Recipe) -> dict[str, bytes]:
    """The bytes of the model, the samples and the step records."""
    plan = make_plan(recipe)
    files = {}
    for name, artifact in {"samples": plan.first_sample.artifact, "checkpoint": plan.distill.artifact}.items():
        folder = Path(artifact.path)
        for path in sorted(folder.rglob("*")):
            is_result = path.suffix in (".safetensors", ".parquet") and "quarantine" not in path.parts
            if path.is_file() and is_result:
                files[f"{name}/{path.relative_to(folder)}"] = path.read_bytes()
    files["steps"] = json.dumps(read_steps(recipe)).encode()
    return files


def read_steps(recipe: Recipe) -> list[dict[str, Any]]:
    folder = Path(make_plan(recipe).distill.artifact.path) / "steps"
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def predictions(recipe: Recipe) -> dict[str, bytes]:
    """The bytes of all evaluations' answers, by artifact."""
    files = sorted(Path(recipe.storage).glob("*-scores-*/*.parquet"))
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}


def assert_each_example_once_an_epoch(recipe: Recipe) -> None:
    for epoch in range(EPOCHS):
        trained: Counter[str] = Counter()
        for record in read_steps(recipe):
            if record["epoch"] == epoch:
                trained.update(record["examples"])
        assert set(trained.values()) == {1}
        assert len(trained) == recipe.study.data.train_examples


def interrupt(monkeypatch: pytest.MonkeyPatch, fault: str, step: int) -> None:
    """Make the fault happen after a step of the next run."""
    report_step = RunCoordinator.report_step

    def count_and_fail(coordinator: RunCoordinator, trained: int, steps: int, loss: float) -> None:
        report_step(coordinator, trained, steps, loss)
        if steps == step:
            if fault == "killed":
                raise Killed
            coordinator.request_stop()

    monkeypatch.setattr(RunCoordinator, "report_step", count_and_fail)


def ended_by_itself(recipe: Recipe) -> bool:
    """Run training. Returns whether it reached its end."""
    try:
        run_distill(recipe)
    except (Stopped, Killed):
        return False
    return True


@pytest.mark.parametrize("fault", ["stopped", "killed", "stopped and corrupt"])
def test_run_distill_resumes_bit_identically_after_every_step(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    run_distill(recipe)
    expected = results(recipe)
    assert len(read_steps(recipe)) == STEPS
    for step in range(1, STEPS + 1):
        interrupted = at_storage(tmp_path, tmp_path / f"{ODD_NAME}-{step}")
        with monkeypatch.context() as patch:
            interrupt(patch, fault, step)
            finished = ended_by_itself(interrupted)
        assert not finished, f"after step {step}"
        if fault != "killed":
            assert len(read_steps(interrupted)) == step
        if "corrupt" in fault:
            part = sorted((Path(make_plan(interrupted).first_sample.artifact.path) / "parts").glob("*.parquet"))[-1:]
            for path in part:
                path.write_bytes(path.read_bytes()[:-40])
        run_distill(interrupted)
        assert results(interrupted) == expected, f"after step {step}"
        assert_each_example_once_an_epoch(interrupted)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("*.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1]), "corrupt ("),
        ("state.json", Path.unlink, "missing"),
        ("progress.json", lambda path: path.write_text("{}"), "corrupt ("),
        ("", shutil.rmtree, "missing, but listed in latest.json"),
    ],
)
def test_run_distill_continues_from_the_state_before_a_corrupt_one(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    damage: Callable[[Path], Any],
    message: str,
) -> None:
    """States are saved after steps 3 and 6, and when it stops after step 7; the newest two are kept."""
    run_distill(recipe)
    expected = results(recipe)
    interrupted = at_storage(tmp_path, tmp_path / ODD_NAME)
    with monkeypatch.context() as patch:
        interrupt(patch, "stopped", 7)
        assert not ended_by_itself(interrupted)
    intact, corrupt = sorted(saved_states(interrupted), key=step_of_state)
    assert [step_of_state(state) for state in (intact, corrupt)] == [6, 7]
    (damaged,) = corrupt.parent.glob(file) if file else (corrupt.parent,)
    damage(damaged)
    capsys.readouterr()

    run_distill(interrupted)
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "training continues" in line)
    assert warning.startswith(f"warning: {damaged}: {message}")
    assert re.search("; training continues from (an earlier state,|the state) at step 6$", warning)
    assert results(interrupted) == expected
    assert_each_example_once_an_epoch(interrupted)


def test_run_distill_ends_if_all_states_are_corrupt(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, "stopped", 7)
        assert not ended_by_itself(recipe)
    for state in saved_states(recipe):
        (state.parent / "state.json").write_text("{}")
    newest = max(saved_states(recipe), key=step_of_state).parent
    checkpoint = make_plan(recipe).distill.artifact.path
    with pytest.raises(UserError) as caught:
        run_distill(recipe)
    assert str(caught.value).startswith(f"{newest}/state.json: corrupt (")
    assert str(caught.value).endswith(f"; remove {checkpoint}/training to train again from the samples")
    assert len(saved_states(recipe)) == 2


def test_run_distill_counts_the_seconds_of_a_stopped_run(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(recipe)
    start = time.monotonic()
    with monkeypatch.context() as patch:
        interrupt(patch, "stopped", 1)
        assert not ended_by_itself(recipe)
    stopped = time.monotonic() - start

    for stage, name in ((plan.first_sample, "sample"), (plan.distill, "distill")):
        file = Path(stage.artifact.path) / "seconds.json"
        assert 0 < json.loads(file.read_text())[name] <= stopped
        # As if the first run had taken longer than the second one can.
        file.write_text(json.dumps({name: 1000.0}))
    start = time.monotonic()
    run_distill(recipe)
    again = time.monotonic() - start
    for stage, name in ((plan.first_sample, "sample"), (plan.distill, "distill")):
        manifest = stage.artifact.manifest()
        assert manifest is not None
        assert 1000 <= manifest.seconds[name] < 1000 + again
    assert not list(Path(recipe.storage).glob("*/seconds.json"))


def test_run_sample_counts_the_seconds_of_an_interrupted_run(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, while samples are made before training begins."""
    count_stored = RunCoordinator.count_stored

    def count_and_interrupt(coordinator: RunCoordinator, *stored: Any) -> None:
        count_stored(coordinator, *stored)
        time.sleep(0.2)
        raise KeyboardInterrupt

    samples = make_plan(recipe).first_sample.artifact
    start = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(RunCoordinator, "count_stored", count_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_sample(recipe)
    stopped = time.monotonic() - start
    recorded = json.loads((Path(samples.path) / "seconds.json").read_text())["sample"]
    assert 0 < recorded <= stopped
    run_sample(recipe)
    manifest = samples.manifest()
    assert manifest is not None
    assert recorded < manifest.seconds["sample"] < time.monotonic() - start
    assert not list(Path(recipe.storage).glob("*/seconds.json"))


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_run_distill_in_order_of_arrival_trains_on_each_example_once_an_epoch(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The order, and so the weights, may differ: what was sampled before comes first."""
    make_recipe(
        training={"global_batch_rows": 8, "epochs": EPOCHS, "order": "arrival"},
        runtime={"executor": "local", "checkpoints": {"steps": 3}, "samplers": {"batch_size": 2}},
    )
    # At a checkpoint, and one step after it. Tests of the loader stop it anywhere.
    for step in (3, 4):
        interrupted = at_storage(tmp_path, tmp_path / f"{ODD_NAME}-{step}")
        with monkeypatch.context() as patch:
            interrupt(patch, fault, step)
            assert not ended_by_itself(interrupted)
        run_distill(interrupted)
        assert_each_example_once_an_epoch(interrupted)


def test_run_study_killed_before_each_stage_is_published_gives_the_same_results(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_recipe(training={"epochs": 1, "order": "fixed"}, runtime={"executor": "local", "samplers": {"batch_size": 2}})
    undisturbed = at_storage(tmp_path, tmp_path / "undisturbed")
    run_study(undisturbed)
    expected = results(undisturbed) | predictions(undisturbed)
    assert len(predictions(undisturbed)) == 2
    publish = Artifact.publish
    interrupted = at_storage(tmp_path, tmp_path / ODD_NAME)
    killed = []
    published: list[str] = []

    def publish_or_die(artifact: Artifact, **contents: Any) -> Any:
        if artifact.path not in killed:
            killed.append(artifact.path)
            raise Killed
        published.append(artifact.path)
        return publish(artifact, **contents)

    monkeypatch.setattr(Artifact, "publish", publish_or_die)
    finished = False
    while not finished:
        try:
            run_study(interrupted)
            finished = True
        except Killed:
            pass
    assert published == killed  # each once: what was published was not made again
    assert len(killed) == 5  # examples, base evaluation, samples, checkpoint, evaluation
    assert results(interrupted) | predictions(interrupted) == expected


@pytest.mark.parametrize("fault", [Killed, KeyboardInterrupt])
def test_run_evaluate_resumes_after_every_part(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    """Four examples with four prompts each; an example is a part. What was answered is not answered again."""
    make_recipe(runtime={"executor": "local", "samplers": {"batch_size": 4}})
    undisturbed = at_storage(tmp_path, tmp_path / "undisturbed")
    run_evaluate(undisturbed)
    expected = predictions(undisturbed)
    answered: list[int] = []
    append = TableParts.append
    for count in range(1, 5):
        interrupted = at_storage(tmp_path, tmp_path / f"{ODD_NAME}-{count}")
        answered.clear()

        def append_and_fail(parts: TableParts, table: pa.Table, last: int = count) -> None:
            append(parts, table)
            answered.append(len(table))
            if len(answered) == last:
                raise fault

        monkeypatch.setattr(TableParts, "append", append_and_fail)
        with pytest.raises(fault):
            run_evaluate(interrupted)
        answered.append(0)  # so that the second run does not fail at the same count
        run_evaluate(interrupted)
        assert predictions(interrupted) == expected, f"after part {count}"
        assert answered == [4] * count + [0] + [4] * (4 - count)
    assert not list(tmp_path.glob("*/*/parts"))
    assert not list(tmp_path.glob("*/*/seconds.json"))


POLLS = 12  # per step: three passes with four micro-batches each


@pytest.mark.parametrize("poll", range(POLLS + 1, 2 * POLLS + 1))
def test_run_distill_resumes_bit_identically_after_a_stop_within_a_step(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poll: int
) -> None:
    """The second step stops after its first micro-batch, its second, and so on."""
    recipe = make_recipe(
        training={"global_batch_rows": 8, "epochs": 1, "order": "fixed"},
        runtime={"executor": "local", "trainers": {"micro_batch_tokens": 600}},
    )
    run_distill(recipe)
    expected = results(recipe)
    polls = 0

    def stop_requested(session: LocalSession) -> bool:
        nonlocal polls
        polls += 1
        return polls == poll

    interrupted = at_storage(tmp_path, tmp_path / ODD_NAME)
    with monkeypatch.context() as patch:
        patch.setattr(LocalSession, "stop_requested", stop_requested)
        with pytest.raises(Stopped):
            run_distill(interrupted)
    assert len(read_steps(interrupted)) == 1 + (poll == 2 * POLLS)
    run_distill(interrupted)
    assert results(interrupted) == expected


def test_local_session_keeps_the_newest_checkpoints(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    save = LocalSession.save_state

    def save_and_count(session: LocalSession, step: int, folder: Path) -> None:
        save(session, step, folder)
        state = Path(session.checkpoint.path) / "training" / "local"
        kept.append(len([path for path in state.iterdir() if path.is_dir()]))
        assert not folder.exists()

    monkeypatch.setattr(LocalSession, "save_state", save_and_count)
    run_distill(recipe)
    assert kept == [1, 2]  # after steps 3 and 6
    assert not (Path(make_plan(recipe).distill.artifact.path) / "training").exists()
