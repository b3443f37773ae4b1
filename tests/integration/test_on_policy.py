"""On-policy R1: the student answers the prompts that it is trained on, in rounds. The tiny model, in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.plan import Plan, Round, make_plan
from pipelines.run_coordinator import RunCoordinator
from pipelines.stages.distill import read_steps
from pos2distill.config import ModelSection, Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import Stopped
from pos2distill.losses.kl import forward_kl
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.records import Example, Tokens, example_from_row
from pos2distill.sampling.engines.protocol import Completion, SamplingParams
from pos2distill.store.checkpoint_layout import MODEL_FOLDER
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.permutations import teacher_slots, trivial_slots
from pos2distill.tasks.prompts import PromptBuilder
from tests.support.commands import run_distill, run_study
from tests.support.engines import hf_engine

pytestmark = pytest.mark.xdist_group("compute")

K, EXAMPLES, ROUNDS = 2, 4, 2

Make = Callable[..., Recipe]


@pytest.fixture
def on_policy(make_recipe: Make) -> Make:
    """A recipe whose global batch holds all samples: one step in a round."""

    def make(**overrides: Any) -> Recipe:
        method = {"name": "r1-on-policy", "k": K, "advantageous_slot": "last", **overrides.pop("method", {})}
        settings: dict[str, Any] = {
            "method": method,
            "data": {"train_examples": EXAMPLES},
            "sampling": {"max_new_tokens": 6, "keep": "all"},
            "training": {"global_batch_rows": EXAMPLES * (K + 1), "learning_rate": 0.01},
            "evaluation": {"slots": 2},
            "runtime": {"executor": "local"},
        }
        return make_recipe(**{**settings, **overrides})

    return make


def samples_of(each: Round) -> list[dict[str, Any]]:
    store = SampleStore(each.sample.artifact)
    rows = [row for name in store.part_names() for row in store._read(name, ["sample_id"]).to_pylist()]
    ids = sorted(row["sample_id"] for row in rows)
    samples: list[dict[str, Any]] = store.load(store.index(ids), list(range(len(ids)))).to_pylist()  # type: ignore[arg-type]
    return samples


def model_of(each: Round, recipe: Recipe) -> ModelSection:
    return recipe.study.model.model_copy(update={"path": f"{each.distill.artifact.url}/{MODEL_FOLDER}"})


def logits_of(model: ModelSection, prompt: Tokens, response: list[int]) -> torch.Tensor:
    """The logits (T, V) that predict the response, by plain transformers."""
    lm: Any = load_model(model)
    ids = torch.tensor([[*prompt.tolist(), *response]])
    with torch.no_grad():
        logits: torch.Tensor = lm(ids).logits[0, len(prompt) - 1 : -1]
    return logits


def expected_responses(student: ModelSection, example: Example, recipe: Recipe) -> list[tuple[Tokens, list[int]]]:
    """What a model answers at the advantageous slot and at the trivial ones: prompts and token ids."""
    study = recipe.study
    builder = PromptBuilder(load_tokenizer(study.model), study.data.prompt, max_length=512, reserve=0)
    engine = hf_engine(student)
    answers = []
    for slots in (study.fixed_advantageous_slots(1), *trivial_slots(study, example)):
        prompt = builder(example, study.data.documents, slots)
        params = SamplingParams(0.0, 1.0, study.sampling.max_new_tokens, (4,))
        (result,) = engine._generate([prompt], params, [0])
        assert isinstance(result, Completion)
        answers.append((prompt, result.token_ids.tolist()))
    return answers


@pytest.mark.parametrize("teacher_slot", ["advantageous", "random"])
@pytest.mark.parametrize("teacher", ["cached", "resident"])
def test_run_distill_on_policy_teaches_the_students_own_answers(
    on_policy: Make, teacher: str, teacher_slot: str
) -> None:
    """In every round: the student of the round before answers, and the base model scores its tokens.

    With a random slot the student answers the same prompts, and the base model scores from another one.
    """
    recipe = on_policy(method={"teacher": teacher, "teacher_slot": teacher_slot})
    build = PromptBuilder(load_tokenizer(recipe.study.model), recipe.study.data.prompt, max_length=512, reserve=0)
    run_distill(recipe)
    frozen = student = recipe.study.model
    plan = make_plan(recipe)
    assert len(plan.rounds) == ROUNDS
    teachers_slots = set()
    for each in plan.rounds:
        by_id = {sample["sample_id"]: sample for sample in samples_of(each)}
        assert len(by_id) == EXAMPLES * (K + 1)
        losses: dict[bool, list[float]] = {True: [], False: []}
        for sample_id, sample in by_id.items():
            if sample["outcome"] != "kept":
                continue
            example = example_from_row(sample["example"])
            name, _, number = sample_id.rpartition("@")
            assert name == example.example_id == sample["example_id"]
            answers = expected_responses(student, example, recipe)
            prompt, sampled = answers[int(number)]
            assert sample["sampled_ids"] == sampled
            # What the teacher gets: another prompt, the same response.
            slots = teacher_slots(recipe.study, example)
            shown = build(example, recipe.study.data.documents, slots)
            assert sample["prompt_ids"] == shown.tolist()
            assert (slots == recipe.study.fixed_advantageous_slots(1)) or teacher_slot == "random"
            teachers_slots.add(slots)
            taught = logits_of(frozen, shown, sample["response_ids"])
            own = logits_of(student, prompt, sample["response_ids"])
            losses[number == "0"].append(float(forward_kl(taught, own).mean()))
        (step,) = read_steps(each.distill.artifact)
        assert step["rows"] == len(losses[True]) + len(losses[False])
        assert step["loss_anchor"] == pytest.approx(sum(losses[True]) / len(losses[True]), abs=1e-4)
        assert step["loss_trivial"] == pytest.approx(sum(losses[False]) / len(losses[False]), abs=1e-4)
        student = model_of(each, recipe)
    assert step["loss_anchor"] > 0.01  # the second round's student has moved
    assert (len(teachers_slots) > 1) == (teacher_slot == "random")


@pytest.mark.parametrize("teacher", ["cached", "resident"])
def test_run_distill_r1_with_a_teacher_at_a_random_slot(on_policy: Make, teacher: str) -> None:
    """The same responses, rows and steps as with the teacher's advantage; the base model scores from another slot."""
    samples: dict[str, dict[str, dict[str, Any]]] = {}
    for slot in ("advantageous", "random"):
        recipe = on_policy(method={"name": "r1", "teacher": teacher, "teacher_slot": slot})
        run_distill(recipe)
        (only,) = make_plan(recipe).rounds
        samples[slot] = {sample["sample_id"]: sample for sample in samples_of(only)}
        (step,) = read_steps(only.distill.artifact)
    answered = {name: sample["sampled_ids"] for name, sample in samples["advantageous"].items()}
    assert {name: sample["sampled_ids"] for name, sample in samples["random"].items()} == answered
    study = recipe.study
    build = PromptBuilder(load_tokenizer(study.model), study.data.prompt, max_length=512, reserve=0)
    losses: dict[bool, list[float]] = {True: [], False: []}
    teachers_slots = set()
    for sample in samples["random"].values():
        example = example_from_row(sample["example"])
        slots = teacher_slots(study, example)
        teachers_slots.add(slots)
        shown = build(example, study.data.documents, slots)
        assert sample["prompt_ids"] == shown.tolist()
        taught = logits_of(study.model, shown, sample["response_ids"])
        for own_slots in (study.fixed_advantageous_slots(1), *trivial_slots(study, example)):
            prompt = build(example, study.data.documents, own_slots)
            own = logits_of(study.model, prompt, sample["response_ids"])
            losses[own_slots == study.fixed_advantageous_slots(1)].append(float(forward_kl(taught, own).mean()))
    assert len(teachers_slots) > 1
    assert step["rows"] == EXAMPLES * (K + 1)
    assert step["loss_anchor"] == pytest.approx(sum(losses[True]) / EXAMPLES, abs=1e-4)
    assert step["loss_trivial"] == pytest.approx(sum(losses[False]) / EXAMPLES / K, abs=1e-4)


@pytest.mark.parametrize("k", [1, 2])
def test_run_distill_on_policy_without_anchors_samples_none(on_policy: Make, k: int) -> None:
    """With lambda 0 no prompt with the advantageous slots is answered; the others are as with lambda 1."""
    training = {"global_batch_rows": EXAMPLES * (k + 1)}
    slots_of: dict[float, set[tuple[str, tuple[int, ...]]]] = {}
    for weight in (1.0, 0.0):
        recipe = on_policy(method={"anchor_weight": weight, "k": k, "rounds": 1}, training=training)
        run_distill(recipe)
        (only,) = make_plan(recipe).rounds
        samples = samples_of(only)
        assert len(samples) == EXAMPLES * (k + (weight > 0))
        slots_of[weight] = {(sample["example"]["example_id"], tuple(sample["slots"])) for sample in samples}
        (step,) = read_steps(only.distill.artifact)
        assert (step["loss_anchor"] is None) == (weight == 0)
        assert step["rows"] == sum(sample["outcome"] == "kept" for sample in samples)
    advantageous = recipe.study.fixed_advantageous_slots(1)
    assert slots_of[0.0] == {(name, slots) for name, slots in slots_of[1.0] if slots != advantageous}


def results(recipe: Recipe) -> dict[str, Any]:
    """The bytes of every round's samples and model, and its step records."""
    found: dict[str, Any] = {}
    for number, each in enumerate(make_plan(recipe).rounds):
        found[f"{number} steps"] = read_steps(each.distill.artifact)
        found[f"{number} model"] = (Path(each.distill.artifact.path) / MODEL_FOLDER / "model.safetensors").read_bytes()
        for part in sorted((Path(each.sample.artifact.path) / "parts").iterdir()):
            found[f"{number} {part.name}"] = part.read_bytes()
    return found


@pytest.mark.parametrize("mode", ["streamed", "staged"])
def test_run_study_on_policy_resumes_bit_identically_in_every_round(
    on_policy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    on_policy(
        training={"global_batch_rows": 2 * (K + 1), "order": "fixed", "epochs": 1},
        runtime={"executor": "local", "mode": mode, "samplers": {"batch_size": 4}},
    )
    whole, interrupted = (
        load_recipe(str(tmp_path / "recipe.yaml"), [f"runtime.storage={tmp_path / name}"]) for name in ("a", "b")
    )
    run_study(whole)
    report_step = RunCoordinator.report_step
    stops = []

    def stop_once_a_round(coordinator: RunCoordinator, trained: int, steps: int, loss: float) -> None:
        report_step(coordinator, trained, steps, loss)
        if steps == 1:
            stops.append(steps)
            coordinator.request_stop()

    with monkeypatch.context() as patch:
        patch.setattr(RunCoordinator, "report_step", stop_once_a_round)
        for _ in range(ROUNDS):
            with pytest.raises(Stopped, match="stopped after step 1"):
                run_study(interrupted)
    run_study(interrupted)
    assert len(stops) == ROUNDS
    assert results(interrupted) == results(whole)
    summary = json.loads((tmp_path / "b" / "report" / "summary.json").read_text())
    assert [name for name in summary["counts"] if name.startswith(("sample", "distill"))] == [
        *("sample", "distill", "sample 2", "distill 2")
    ]
    assert summary["counts"]["distill 2"] == {"examples": EXAMPLES, "rows": EXAMPLES * (K + 1), "epochs": 1, "steps": 2}


def test_run_distill_on_policy_keeps_the_base_model_with_adapters(on_policy: Make) -> None:
    """A later round begins with merged adapters: without its own ones, the student is not the base model any more."""
    training = {"global_batch_rows": EXAMPLES * (K + 1), "learning_rate": 0.05, "lora": {"rank": 4}}
    losses = []
    for teacher in ("cached", "resident"):
        recipe = on_policy(method={"teacher": teacher}, training=training)
        run_distill(recipe)
        losses.append([read_steps(each.distill.artifact)[0]["loss_trivial"] for each in make_plan(recipe).rounds])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][1] != pytest.approx(losses[0][0], abs=1e-3)


def test_make_plan_rounds_begin_where_the_last_one_ended(on_policy: Make) -> None:
    two, three = on_policy(), on_policy(method={"rounds": 3})
    plan = make_plan(two)
    first, second = plan.rounds
    assert "student" not in {**first.sample.inputs, **first.distill.inputs}
    assert second.sample.inputs["student"] == second.distill.inputs["student"] == first.distill.output()
    assert (plan.first_sample, plan.distill) == (first.sample, second.distill)
    assert plan.evaluate_distilled.inputs["checkpoint"] == second.distill.output()
    # One more round keeps the rounds before it.
    longer: Plan = make_plan(three)
    assert [stage.fingerprint for stage in longer.stages[:-3]] == [stage.fingerprint for stage in plan.stages[:-1]]
    assert [stage.name for stage in longer.stages_for_distill()] == [
        *("prepare", "sample", "distill", "sample 2", "distill 2", "sample 3", "distill 3")
    ]
    assert [stage.name for stage in longer.stages_for_sample()] == ["prepare", "sample"]


@pytest.mark.slow
def test_run_distill_on_policy_by_zero3_gives_the_losses_of_torch(
    local_ray: None, on_policy: Make, tmp_path: Path
) -> None:
    """Also in the second round, where the base model is another one than the student begins with."""
    trainers = {"strategy": "zero3", "workers": 2, "threads": 1, "gradient_checkpointing": False}
    runtimes: dict[str, dict[str, Any]] = {"torch": {"executor": "local"}, "zero3": {"trainers": trainers}}
    losses = {}
    for name, runtime in runtimes.items():
        recipe = on_policy(method={"teacher": "resident"}, runtime={**runtime, "storage": str(tmp_path / name)})
        run_distill(recipe)
        losses[name] = [read_steps(each.distill.artifact)[0]["loss"] for each in make_plan(recipe).rounds]
    assert losses["zero3"] == pytest.approx(losses["torch"], rel=1e-3)
    assert losses["torch"][1] != pytest.approx(losses["torch"][0], rel=0.01)
