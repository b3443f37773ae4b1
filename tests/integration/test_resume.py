"""A law: whatever happens after any step of a study, running it again gives the same result, bit for bit.

On the local executor, whose steps take milliseconds, so that every step can be the one. Real processes are killed in
the slow tier.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.commands import run_distill
from pipelines.executors.local import LocalSession
from pipelines.plan import make_plan
from pipelines.progress import ProgressTracker
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import Stopped

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
    for name, artifact in {"samples": plan.sample.artifact, "checkpoint": plan.distill.artifact}.items():
        folder = Path(artifact.path)
        for path in sorted(folder.rglob("*")):
            is_result = path.suffix in (".safetensors", ".parquet") and "quarantine" not in path.parts
            if path.is_file() and is_result:
                files[f"{name}/{path.relative_to(folder)}"] = path.read_bytes()
    files["steps"] = json.dumps(read_steps(recipe)).encode()
    return files


def read_steps(recipe: Recipe) -> list[dict[str, object]]:
    folder = Path(make_plan(recipe).distill.artifact.path) / "steps"
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def interrupt(monkeypatch: pytest.MonkeyPatch, fault: str, step: int) -> None:
    """Make the fault happen after a step of the next run."""
    count_step = ProgressTracker.count_step

    def count_and_fail(tracker: ProgressTracker, trained: int, steps: int, loss: float) -> None:
        count_step(tracker, trained, steps, loss)
        if steps == step:
            if fault == "killed":
                raise Killed
            tracker.request_stop()

    monkeypatch.setattr(ProgressTracker, "count_step", count_and_fail)


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
        interrupted = at_storage(tmp_path, tmp_path / f"after-{step}")
        with monkeypatch.context() as patch:
            interrupt(patch, fault, step)
            finished = ended_by_itself(interrupted)
        assert not finished, f"after step {step}"
        if fault != "killed":
            assert len(read_steps(interrupted)) == step
        if "corrupt" in fault:
            part = sorted((Path(make_plan(interrupted).sample.artifact.path) / "parts").glob("*.parquet"))[-1:]
            for path in part:
                path.write_bytes(path.read_bytes()[:-40])
        run_distill(interrupted)
        assert results(interrupted) == expected, f"after step {step}"
        for epoch in range(EPOCHS):
            trained = Counter(
                example
                for record in read_steps(interrupted)
                if record["epoch"] == epoch
                for example in record["examples"]  # type: ignore[attr-defined]
            )
            assert set(trained.values()) == {1}, f"after step {step}"
            assert len(trained) == recipe.study.data.train_examples


QUESTIONS = 12  # of one step: in each of three passes, after each of four micro-batches


@pytest.mark.parametrize("question", range(QUESTIONS + 1, 2 * QUESTIONS + 1))
def test_run_distill_resumes_bit_identically_after_a_stop_within_a_step(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: int
) -> None:
    """The second step stops after its first micro-batch, its second, and so on."""
    recipe = make_recipe(
        training={"global_batch_rows": 8, "epochs": 1, "order": "fixed"},
        runtime={"executor": "local", "trainers": {"micro_batch_tokens": 600}},
    )
    run_distill(recipe)
    expected = results(recipe)
    questions = 0

    def stop_requested(session: LocalSession) -> bool:
        nonlocal questions
        questions += 1
        return questions == question

    interrupted = at_storage(tmp_path, tmp_path / "interrupted")
    with monkeypatch.context() as patch:
        patch.setattr(LocalSession, "stop_requested", stop_requested)
        with pytest.raises(Stopped):
            run_distill(interrupted)
    assert len(read_steps(interrupted)) == 1 + (question == 2 * QUESTIONS)
    run_distill(interrupted)
    assert results(interrupted) == expected


def test_local_session_keeps_the_newest_checkpoints(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    save = LocalSession.save_checkpoint

    def save_and_count(session: LocalSession, step: int, folder: Path) -> None:
        save(session, step, folder)
        state = Path(session.checkpoint.path) / "training" / "local"
        kept.append(len([path for path in state.iterdir() if path.is_dir()]))
        assert not folder.exists()

    monkeypatch.setattr(LocalSession, "save_checkpoint", save_and_count)
    run_distill(recipe)
    assert kept == [1, 2]  # after steps 3 and 6
    assert not (Path(make_plan(recipe).distill.artifact.path) / "training").exists()
