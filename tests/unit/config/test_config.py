import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError

from pos2distill.config import (
    METHODS,
    DataSection,
    EvaluationSection,
    LoraSection,
    MethodSection,
    ModelSection,
    Recipe,
    Runtime,
    Study,
    TrainingSection,
    fingerprint,
)
from pos2distill.config.inference import InferenceSection
from pos2distill.config.inference_table import INFERENCE_METHODS, InferenceMethodName
from pos2distill.config.load import load_recipe, make_recipe
from pos2distill.config.method_table import MethodName
from pos2distill.config.paths import project_root
from pos2distill.config.read import recipe_names
from pos2distill.config.sweep import sweep_cells
from pos2distill.errors import UserError

MINIMAL: dict[str, Any] = {
    "name": "small",
    "description": "the least a recipe can say",
    "model": {"path": "some/model"},
    "data": {"format": "nq", "path": "data.jsonl"},
}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Recipe]:
    def load(*overrides: str, **changes: Any) -> Recipe:
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump({**MINIMAL, **changes}))
        return load_recipe(str(path), overrides)

    return load


def test_study_defaults_are_those_of_the_paper(load: Callable[..., Recipe]) -> None:
    study = load().study
    training = study.training
    assert (training.learning_rate, training.betas, training.weight_decay) == (3e-6, (0.9, 0.95), 0.01)
    assert (training.warmup_ratio, training.min_lr_ratio, training.max_grad_norm) == (0.05, 0.1, 1.0)
    assert (training.global_batch_rows, training.epochs, training.precision) == (32, 2, "bfloat16")
    assert (study.method.k, study.method.anchor_weight, study.method.weights) == (4, 1.0, "paper")
    assert (study.method.distractor_order, study.sampling.temperature) == ("fixed", 0.0)
    assert study.fixed_advantageous_slots(1) == (0,)
    assert (study.data.documents, study.data.train_examples) == (20, 300)


def test_make_recipe_does_not_change_its_argument() -> None:
    sections = copy.deepcopy(MINIMAL)
    recipe = make_recipe(sections, ["model.path=other", "data.path=x.jsonl", "sweep.seed=[0, 1]"])
    assert (recipe.study.model.path, recipe.storage) == ("other", str(Path("runs/small").absolute()))
    assert sections == MINIMAL


def test_load_recipe_accepts_every_built_in_recipe() -> None:
    names = recipe_names()
    assert "quickstart" in names
    assert [load_recipe(name).name for name in names] == names


def test_study_advantageous_last_depends_on_documents(load: Callable[..., Recipe]) -> None:
    assert load("method.advantageous_slot=last", "data.documents=7").study.fixed_advantageous_slots(1) == (6,)


@pytest.mark.parametrize(
    ("prompt", "metric"),
    [("qa", "sub_em"), ("plain", "sub_em"), ("kv", "substring"), ("coc", "em"), ("reasoning", "em")],
)
def test_metric_is_the_prompts_own(load: Callable[..., Recipe], prompt: str, metric: str) -> None:
    assert load(f"data.prompt={prompt}").study.data.metric == metric


@pytest.mark.parametrize(("form", "prompt"), [("kv", "kv"), ("nq", "qa"), ("jsonl", "qa")])
def test_prompt_is_the_formats_own(load: Callable[..., Recipe], form: str, prompt: str) -> None:
    assert load(f"data={{format: {form}, path: x}}").study.data.prompt == prompt
    assert load(f"data={{format: {form}, path: x, prompt: plain}}").study.data.prompt == "plain"
    assert (
        load(f"data={{format: {form}, path: x, template: {{user: '{{documents}} {{question}}'}}}}").study.data.prompt
        == "template"
    )


def test_retriever_ranks_are_those_of_one_document(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"retriever_ranks: only for one gold document"):
        load("data.hops=[2]", "data.format=musique", "evaluation.retriever_ranks=[1]")


def test_reordered_documents_have_one_order(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"distractor_orders: 2, but inference.method 'reorder' orders them; set 1"):
        load("inference.method=reorder", "evaluation.distractor_orders=2")


@pytest.mark.parametrize(
    ("settings", "documents", "golds", "available"),
    [
        (["data.documents=2", "method.k=1"], 2, 1, 1),
        (["data.documents=4", "method.k=1"], 4, 1, 6),
        (["evaluation.other_documents=[3]"], 3, 1, 2),
        (["data.documents=6", "data.hops=[2,4]", "data.format=musique"], 6, 4, 2),
    ],
)
def test_distractor_orders_exist(
    load: Callable[..., Recipe], settings: list[str], documents: int, golds: int, available: int
) -> None:
    """Otherwise some would be equal, and the fraction of questions that an order breaks too low."""
    load(*settings, f"evaluation.distractor_orders={available}")
    message = (
        f"evaluation.distractor_orders: {available + 1} orders, but {documents} documents, {golds} of them gold, "
        f"have {available}; lower it"
    )
    with pytest.raises(UserError, match=re.escape(message) + "$"):
        load(*settings, f"evaluation.distractor_orders={available + 1}")


def test_metric_must_fit_the_prompt(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"data.metric: 'sub_em', but prompt 'coc' asks for 'The answer is:'; set data"):
        load("data.prompt=coc", "data.metric=sub_em")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rte=1", "training.learning_rte: unknown field; did you mean 'learning_rate'?"),
        ("modle.path=x", "modle: unknown field; did you mean 'model'?"),
        ("nmae=x", "nmae: unknown field; did you mean 'name'?"),
        ("runtime.smaplers.min=2", "runtime.smaplers: unknown field; did you mean 'samplers'?"),
        ("runtime.trainers.worker=2", "runtime.trainers.worker: unknown field; did you mean 'workers'?"),
        (
            "sampling.zzz=1",
            "sampling.zzz: unknown field; expected one of: candidates, keep, max_new_tokens, temperature, top_p",
        ),
        ("learning_rate=1", "learning_rate: unknown field; did you mean 'training.learning_rate'?"),
        ("training.betas=1", "training.betas: input should be a list, for example [0, 9], got 1"),
        ("data={format: jsonl, path: x, hops: 2}", "data.hops: input should be a list, for example [2], got 2"),
        ("evaluation.also_evaluate=kv", "evaluation.also_evaluate: input should be a list, for example [kv], got 'kv'"),
        (
            "training.lora.targets=up",
            "training.lora.targets: input should be 'all' or a list, for example [up], got 'up'",
        ),
        ("model=x", "model: expected a section with fields, got 'x'"),
        (
            "training.order=Fixed",
            "training.order: input should be 'arrival' or 'fixed', got 'Fixed'; did you mean 'fixed'?",
        ),
        ("training.epochs=many", "training.epochs: input should be a valid integer, got 'many'"),
        (
            "evaluation.slots=0,4",
            "evaluation.slots: input should be 'all' or 'pairs' or a valid integer or a list, for example [0, 4], got "
            "'0,4'",
        ),
        ("training.seed=1", "training.seed: unknown field; did you mean 'seed'?"),
        ("training.epochs=1.5", "training.epochs: input should be a valid integer, got 1.5"),
        ("training.strategy=zero3", "training.strategy: unknown field; did you mean 'runtime.trainers.strategy'?"),
        ("training.epochs=0", "training.epochs: input should be greater than or equal to 1, got 0"),
        ("training.lr=1e-4", "training.lr: unknown field; did you mean 'training.learning_rate'?"),
        ("training.num_train_epochs=2", "training.num_train_epochs: unknown field; did you mean 'training.epochs'?"),
        ("training.batch_size=8", "training.batch_size: unknown field; did you mean 'training.global_batch_rows'?"),
        ("sampling.n=4", "sampling.n: unknown field; did you mean 'sampling.candidates'?"),
        ("output_dir=x", "output_dir: unknown field; did you mean 'runtime.storage'?"),
        ("evaluation.positions=[1]", "evaluation.positions: unknown field; did you mean 'evaluation.slots'?"),
        ("method=sft", "method: expected a section with fields, such as name: sft, got 'sft'"),
        ("inference=ms_poe", "inference: expected a section with fields, such as method: ms_poe, got 'ms_poe'"),
        ("training.lora.rnk=8", "training.lora.rnk: unknown field; did you mean 'rank'?"),
        ("training.lora.rank=0", "training.lora.rank: input should be greater than or equal to 1, got 0"),
        ("training.lora.targets=[]", "training.lora.targets: expected at least one linear layer, or all"),
        ("training.lora=16", "training.lora: expected a section with fields, got 16"),
        (
            "model.dtype=float16",
            "model.dtype: input should be 'bfloat16', 'float32' or 'auto', got 'float16'; did you mean 'bfloat16'?",
        ),
        ("model.path=", "model.path: input should be a valid string, got nothing"),
        ("name=Not Good", "name: expected a name of a to z, 0 to 9, _, . and -, for example my_study, got 'Not Good'"),
        ("data.documents=4", "method.k: 4 trivial slots, but 4 documents have 3; lower method.k"),
        ("method.advantageous_slot=20", "method.advantageous_slot: 20 is not one of the slots 0 to 19"),
        ("method.advantageous_slot=-1", "method.advantageous_slot: -1 is not one of the slots 0 to 19"),
        ("method.advantageous_slot=[3, 4]", "method.advantageous_slot: [3, 4] should be 1 different slots"),
        (
            "method.weights=adaptive",
            "method.weights: 'adaptive' is not supported by method 'r1'; expected ",
        ),
        ("method={name: sft, weights: adaptive}", "method.weights: 'adaptive' is not supported by method 'sft'"),
        ("method.teacher_topk=8", "method.teacher_topk: only teacher 'topk' keeps some tokens, not 'cached'"),
        ("method={teacher: topk, teacher_topk: 0}", "method.teacher_topk: input should be greater than or equal to 1"),
        ("method.teacher=none", "method.teacher: method 'r1' needs one; set cached, resident or topk"),
        (
            "method.name=r3",
            "method.name: input should be 'r1', 'kl+align', 'kl', 'r1-on-policy', 'r2', 'seqkd' or 'sft', got 'r3'",
        ),
        (
            "method.name=[r1]",
            "method.name: input should be 'r1', 'kl+align', 'kl', 'r1-on-policy', 'r2', 'seqkd' or 'sft', got",
        ),
        ("method.rounds=2", "method.rounds: 2, but method 'r1' samples once, from the base model"),
        (
            "method={name: r1-on-policy, teacher: topk}",
            "method.teacher: 'topk' stores what the sampler knows, which for method 'r1-on-policy' is the student",
        ),
        (
            "method={name: seqkd, teacher_slot: random}",
            "method.teacher_slot: 'random', but the loss of method 'seqkd' has no teacher",
        ),
        (
            "method={name: seqkd, weights: adaptive, teacher_slot: random}",
            "method.teacher_slot: 'random', but weights 'adaptive' compare with the teacher at the advantageous slots",
        ),
        (
            "method={name: r1, teacher: topk, teacher_slot: random}",
            "method.teacher_slot: 'random', but teacher 'topk' knows the answered prompt alone; set teacher",
        ),
        (
            "method={name: r1, teacher_slot: random, distractor_order: reshuffled}",
            "method.teacher_slot: 'random' is the control of distractor_order 'fixed', not 'reshuffled'",
        ),
        (
            "method={name: r1-on-policy, distractor_order: reshuffled}",
            "method.distractor_order: 'reshuffled' would train on other prompts than those that the student",
        ),
        ("sampling.candidates=4", "sampling.candidates: 4 greedy responses would all be the same; set sampling.temp"),
        (
            "method={teacher: topk, alignment: official}",
            "method.alignment: 'official' distils one position after the response's end, where the sampler knows no",
        ),
        (
            "method={name: r2, weights: adaptive, teacher: topk}",
            "method.weights: 'adaptive' needs the base model's loss on the whole response, and the sampler knows",
        ),
        ("method={name: r2, weights: paper}", "method.weights: 'paper' is not supported by method 'r2'"),
        (
            "method={name: r2, alignment: official}",
            "method.alignment: 'official' applies to KL losses only; method 'r2'",
        ),
        ("method={name: kl, k: 0}", "method.k: 0 trivial slots and no weight on the advantageous one leave nothing"),
        ("method={name: r1, k: 0}", "method.k: 0 trivial slots leave the KL of the model to itself alone; set at lea"),
        ("data.hops=[2]", "data.hops: records of format 'nq' have one gold document; set [1]"),
        (
            "data={format: musique, path: x}",
            "data.hops: records of format 'musique' have several gold documents; set [2]",
        ),
        ("data={format: jsonl, path: x, hops: [5]}", "data.hops: expected numbers of gold documents from 1 to 4"),
        ("data={format: jsonl, path: x, hops: [3], documents: 3}", "data.hops: 3 gold documents leave no distractor"),
        ("data={format: jsonl, path: x, hops: [1, 2]}", "data.hops: one hop and several cannot be mixed"),
        ("evaluation.slots=0", "evaluation.slots: input should be"),
        ("evaluation.slots=21", "evaluation.slots: 21 slots, but there are 20; lower it, or set it to all"),
        (
            "evaluation={other_documents: [30, 8], other_slots: 9}",
            "evaluation.other_slots: 9 slots, but there are 8; lower it, or set it to all",
        ),
        ("method.auto_slots=0", "method.auto_slots: input should be"),
        (
            "method.view=skip",
            "method.view: 'skip' is for cross-entropies with uniform weights, not for method 'r1' with",
        ),
        (
            "method={name: r2, weights: adaptive, view: cyclic}",
            "method.view: 'cyclic' is for cross-entropies with uniform weights, not for method 'r2' with weights 'adap",
        ),
        ("method.view_weight=0", "method.view_weight: input should be greater than 0, got 0"),
        ("inference.method=lps", "inference.method: input should be 'none', 'reorder', 'uniform_scale', 'lpes', 'ms"),
        (
            "inference={method: uniform_scale}",
            "inference.scales: 'uniform_scale' needs one number, for example [1.5], got none",
        ),
        (
            "inference={method: uniform_scale, scales: [1.5, 2]}",
            "inference.scales: 'uniform_scale' needs one number, for example [1.5], got 2 numbers",
        ),
        ("inference.scales=[1.5]", "inference.scales: method 'none' has none; set inference.method to uniform_scale"),
        ("inference={method: lpes, scales: [0]}", "inference.scales: input should be greater than or equal to 0.25"),
        (
            "inference.method=ms_poe",
            "inference.method: 'ms_poe' changes attention in a way that vLLM does not support",
        ),
        ("inference.method=attention_buckets", "inference.method: 'attention_buckets' changes attention in a way that"),
        ("inference.bases=[1]", "inference.bases: "),
        ("inference.ms_poe.smallest=1.9", "inference.ms_poe.smallest: 1.9 is above largest (1.8)"),
        (
            "inference={method: lpes, scales: [2]}",
            "inference.scales: 'lpes' needs one for each layer; for one scale, set",
        ),
        (
            "inference.search.curve=cubic",
            "inference.search.curve: input should be 'bezier', 'linear' or 'step', got 'cu",
        ),
        (
            "inference.search.control_points=1",
            "inference.search.control_points: input should be greater than or equal to 2, got 1",
        ),
        (
            "inference.search.control_points=101",
            "inference.search.control_points: input should be less than or equal to 100, got 101",
        ),
        (
            "inference={method: lpes, search: {slots: 21}}",
            "inference.search.slots: 21 slots, but there are 20; lower it",
        ),
        (
            "inference.ms_poe.ranking=inverse",
            "inference.ms_poe.ranking: input should be 'rank' or 'released', got 'inv",
        ),
        ("inference.search.smallest=2", "inference.search.smallest: 2 is not below largest (2)"),
        (
            "inference.search={mutations: 0, crossovers: 0}",
            "inference.search.mutations: 0, and no crossovers; later generations would be empty",
        ),
        ("inference.search.parents=65", "inference.search.parents: 65, but a population of 64"),
        ("model.rope_scales=[1.5]", "model.rope_scales: filled in from inference.scales; set those"),
        (
            "method={advantageous_slot: auto, auto_slots: 21}",
            "method.auto_slots: 21 slots, but there are 20; lower it, or set it to all",
        ),
        (
            "evaluation={other_documents: [30], other_slots: pairs}",
            "evaluation.other_slots: 'pairs' are for several hops",
        ),
        (
            "training.learning_rate=[1.0e-3, 3.0e-4]",
            "training.learning_rate: input should be a valid number, got [0.001, 0.0003]; to try several with `study`, "
            "set sweep.training.learning_rate",
        ),
        ("runtime.samplers.max=[1, 2]", "runtime.samplers.max: input should be a valid integer, got [1, 2]"),
        (
            "data.path=[a.jsonl, b.jsonl]",
            "data.path: input should be a valid string, got ['a.jsonl', 'b.jsonl']; for several files, use a pattern "
            "with *",
        ),
        ("evaluation.other_documents=[30, 30]", "evaluation.other_documents: expected each number once"),
        ("other_tasks={}", "other_tasks: unknown field; expected one of"),
        (
            "data={path: x, format: kv, metric: em}",
            "data.metric: 'em', but prompt 'kv' does not ask for 'The answer is:'; set "
            "data.metric=substring or another",
        ),
        (
            "data.metric=em",
            "data.metric: 'em', but prompt 'qa' does not ask for 'The answer is:'; set data.metric=sub_em or another",
        ),
        ("evaluation.slots=pairs", "evaluation.slots: 'pairs' are for several hops (data.hops)"),
        ("evaluation.slots=[0, 20]", "evaluation.slots: 20 is not one of the slots 0 to 19"),
        ("evaluation.slots=[0, 0]", "evaluation.slots: expected at least one slot, each of them once"),
        ("evaluation.slots=[]", "evaluation.slots: expected at least one slot, each of them once"),
        (
            "data.train_candidates=3",
            "data.train_candidates: 3 examples cannot give 300 to train on (data.train_examples)",
        ),
        (
            "evaluation.retriever_ranks=[2, -1]",
            "evaluation.retriever_ranks: expected at most 20 numbers (data.documents), none of them negative and not",
        ),
        ("evaluation.retriever_ranks=[0, 0]", "evaluation.retriever_ranks: expected at most 20 numbers"),
        ("evaluation.other_documents=[30, 1]", "evaluation.other_documents: 1 leaves no distractor (data.hops) or"),
        (
            "evaluation.other_documents=[20]",
            "evaluation.other_documents: 20 leaves no distractor (data.hops) or equals data.documents",
        ),
        ("runtime.samplers={min: 3, max: 2}", "runtime.samplers.min: 3 is more than max, 2"),
        (
            "runtime.trainers={strategy: torch, workers: 2}",
            "runtime.trainers.workers: strategy 'torch' is one process, got 2; use zero3",
        ),
    ],
)
def test_load_recipe_reports_field_and_remedy_of_a_bad_value(
    load: Callable[..., Recipe], override: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    assert str(caught.value).startswith(f"command line: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "suggests_sweep"),
    [
        ("seed=[1, 2]", True),
        ("method.name=[r1, sft]", True),
        ("method.name=[r1, nope]", False),
        ("sampling.temperature=[hot, cold]", False),
        ("evaluation.slots=[a, b]", False),
        ("training.learning_rate=[1e-5, -1]", False),
        ("training.lora=[1, 2]", False),
        ("runtime.samplers.max=[1, 2]", False),
    ],
)
def test_load_recipe_suggests_a_sweep_over_valid_values_only(
    load: Callable[..., Recipe], override: str, suggests_sweep: bool
) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    hint = f"; to try several with `study`, set sweep.{override.partition('=')[0]}"
    assert str(caught.value).endswith(hint) is suggests_sweep
    assert ("sweep" in str(caught.value)) is suggests_sweep


def test_load_recipe_names_the_file_of_a_bad_value(load: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load("seed=3", training={"epochs": 0})
    assert str(caught.value).startswith(f"{tmp_path / 'small.yaml'}: training.epochs: input should be")


@pytest.mark.parametrize(
    ("override", "changes", "field"),
    [
        ("method.k=2", {"method": {"rounds": 2}}, "method.rounds"),
        ("evaluation.seed=3", {"evaluation": {"slots": [1, 1]}}, "evaluation.slots"),
        ("sampling.max_new_tokens=16", {"sampling": {"candidates": 4, "temperature": 0.0}}, "sampling.candidates"),
        # Its message has other numbers with the override.
        ("data.documents=3", {"evaluation": {"slots": [0, 50]}, "method": {"k": 2}}, "evaluation.slots"),
    ],
)
def test_load_recipe_names_the_file_of_a_contradiction_that_it_has_by_itself(
    load: Callable[..., Recipe], tmp_path: Path, override: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(override, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'small.yaml'}: {field}: ")


@pytest.mark.parametrize(
    ("override", "changes", "field"),
    [
        ("method.name=r1", {"method": {"name": "r1-on-policy", "rounds": 2}}, "method.rounds"),
        ("sampling.temperature=0", {"sampling": {"candidates": 4, "temperature": 1.0}}, "sampling.candidates"),
        ("data.documents=4", {"method": {"k": 4}}, "method.k"),
    ],
)
def test_load_recipe_names_the_command_line_where_it_contradicts_the_file(
    load: Callable[..., Recipe], override: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError, match=rf"^command line: {field}: "):
        load(override, **changes)


@pytest.mark.parametrize("field", ["method.advantageous_slot", "evaluation.slots"])
def test_load_recipe_names_a_field_of_several_types(load: Callable[..., Recipe], field: str) -> None:
    with pytest.raises(UserError, match=rf": {field}: .*got 'middle'$"):
        load(f"{field}=middle")


def test_load_recipe_reports_a_misspelt_field_first(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"data\.pth: unknown field; did you mean 'path'\?"):
        load(data={"format": "nq", "pth": "data.jsonl"})


@pytest.mark.parametrize(
    ("section", "message"),
    [("model", "small.yaml: model: missing"), ("data", "small.yaml: data: missing")],
)
def test_load_recipe_names_a_missing_section(tmp_path: Path, section: str, message: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in MINIMAL.items() if key != section}))
    with pytest.raises(UserError, match=message):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [1, 2", "not valid YAML: line 2: did not find expected"),
        (b"- model\n- data\n", "expected sections .*, got a list"),
        (b"", "expected sections .*, got nothing"),
        (b"name: \xff\xfe", "not valid YAML"),
        (b"name: 2024-13-45", "not valid YAML"),
    ],
)
def test_load_recipe_refuses_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"broken.yaml: {message}") as caught:
        load_recipe(str(path))
    assert "\n" not in str(caught.value)


def test_load_recipe_suggests_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"^quickstrat: no such recipe; did you mean 'quickstart'\?$"):
        load_recipe("quickstrat")


def test_load_recipe_suggests_the_nearest_file(load: Callable[..., Recipe], tmp_path: Path) -> None:
    load()
    with pytest.raises(UserError, match=rf"no such recipe; did you mean '{tmp_path}/small.yaml'\?$"):
        load_recipe(f"{tmp_path}/small.yam")


def test_load_recipe_suggests_no_recipe_names_for_a_path(load: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{tmp_path}/my_hotpot.yaml: no such file$"):
        load_recipe(f"{tmp_path}/my_hotpot.yaml")
    load()
    with pytest.raises(UserError, match=rf"smal.yaml: no such file; did you mean '{tmp_path}/small.yaml'\?$"):
        load_recipe(f"{tmp_path}/smal.yaml")


def test_load_recipe_suggests_no_hidden_file(tmp_path: Path) -> None:
    (tmp_path / ".pre-commit-config.yaml").write_text("repos: []\n")
    with pytest.raises(UserError) as caught:
        load_recipe(f"{tmp_path}/pre-commit-config.yaml")
    assert ".pre-commit" not in str(caught.value)


def test_load_recipe_refuses_a_data_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    with pytest.raises(
        UserError, match=r"rows.jsonl: expected a recipe, a file named \*.yaml; data goes to data.path$"
    ):
        load_recipe(str(path))


def test_load_recipe_overrides_are_yaml_values(load: Callable[..., Recipe]) -> None:
    recipe = load(
        "training.learning_rate=1e-5", "runtime.samplers.max=3", "evaluation.slots=[0, 9]", "description=a=b", "seed=7"
    )
    assert recipe.study.training.learning_rate == 1e-5
    assert recipe.runtime.samplers.max == 3
    assert recipe.study.evaluation.slots == (0, 9)
    assert recipe.description == "a=b"
    assert recipe.study.seed == 7


def test_load_recipe_applies_the_last_override(load: Callable[..., Recipe]) -> None:
    assert load("seed=1", "seed=2").study.seed == 2
    assert load("seed = 3").study.seed == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.epochs", "training.epochs: expected section.field=value"),
        ("=3", "=3: expected section.field=value"),
        ("training.epochs 3", "training.epochs 3: expected section.field=value; did you mean 'training.epochs=3'?"),
        ("= 5", "= 5: expected section.field=value"),
        ("the recipe is", "the recipe is: expected section.field=value"),
        ("training.epochs: 3", "training.epochs: 3: expected section.field=value; did you mean 'training.epochs=3'?"),
        ("training.epochs:3", "training.epochs:3: expected section.field=value; did you mean 'training.epochs=3'?"),
        ("training.epochs : 3", "training.epochs : 3: expected section.field=value; did you mean 'training.epochs=3'?"),
        ("seed: 5", "seed: 5: expected section.field=value; did you mean 'seed=5'?"),
        (
            "evaluation.slots: [1, 2]",
            "evaluation.slots: [1, 2]: expected section.field=value; did you mean 'evaluation.slots=[1, 2]'?",
        ),
        ("training. epochs=3", "training. epochs=3: expected section.field=value"),
        ("the recipe", "the recipe: expected section.field=value"),
        ("training..epochs=3", "training..epochs=3: expected section.field=value"),
        (".epochs=3", ".epochs=3: expected section.field=value"),
        ("name.first=x", "name.first: 'name' is a single value and has no fields"),
        (
            "seed=[1",
            "seed: cannot read the value: not valid YAML: line 2: did not find expected ',' or ']'; if it has blanks, "
            "put the whole setting in quotes",
        ),
        ("seed=2024-13-45", "seed: cannot read the value: not valid YAML: a value cannot be converted (ValueError)"),
    ],
)
def test_load_recipe_reports_a_bad_override(load: Callable[..., Recipe], override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    assert str(caught.value) == message


def test_load_recipe_makes_local_paths_absolute(
    load: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    recipe = load("model.path=base")
    assert recipe.study.model.path == str(tmp_path / "base")
    assert recipe.study.data.path == str(tmp_path / "data.jsonl")
    assert recipe.storage == str(tmp_path / "runs" / "small")
    remote = load("data.path=s3://bucket/data.jsonl", "runtime.storage=gs://bucket/run")
    assert (remote.study.model.path, remote.study.data.path) == ("some/model", "s3://bucket/data.jsonl")
    assert remote.storage == "gs://bucket/run"


def test_load_recipe_of_the_project_works_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart")
    toy = project_root() / "examples" / "toy"
    assert (recipe.study.model.path, recipe.study.data.path) == (str(toy / "base"), str(toy / "data.jsonl.gz"))
    assert recipe.storage == str(tmp_path / "runs" / "quickstart")
    # A hub name stays; data that does not come with the project is in the working directory.
    published = load_recipe("nq_llama3_8b").study
    assert published.model.path == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert published.data.path == str(tmp_path / "data" / "nq-open-20_total_documents_gold_at_0.jsonl.gz")
    # An override is the user's own.
    assert load_recipe("quickstart", ["data.path=own.jsonl"]).study.data.path == str(tmp_path / "own.jsonl")


def test_load_recipe_keeps_the_paths_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built_in = load_recipe("quickstart")
    assert built_in.written_paths == {"model.path": "examples/toy/base", "data.path": "examples/toy/data.jsonl.gz"}
    # The same words on the command line mean a file in the user's working directory.
    same = load_recipe("quickstart", ["data.path=examples/toy/data.jsonl.gz", "runtime.storage=runs/x"])
    assert same.written_paths == built_in.written_paths | {"runtime.storage": "runs/x"}
    assert same.study.data.path == str(tmp_path / "examples" / "toy" / "data.jsonl.gz")
    assert "written_paths" not in same.model_dump()


def test_project_root_of_a_checkout_has_run_py() -> None:
    assert (project_root() / "run.py").is_file()
    assert (project_root() / "pipelines" / "recipes" / "quickstart.yaml").is_file()


def test_project_root_of_a_wheel_is_the_package(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "pos2distill"
    package.mkdir(parents=True)
    assert project_root(package) == tmp_path / "site-packages"
    (package / "pipelines" / "recipes").mkdir(parents=True)
    (tmp_path / "site-packages" / "run.py").touch()  # of another package
    assert project_root(package) == package


def test_section_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MethodSection().k = 5  # type: ignore[misc]


def test_fingerprint_is_pinned() -> None:
    """Changing this value orphans every artifact that users have."""
    # SHA-256 of: ["data", {"a": [2.5, null], "b": 1}, "ä"]
    assert fingerprint("data", {"b": 1, "a": [2.5, None]}, "ä") == "d6059818621a6f6c"


def test_fingerprint_of_equal_parts_is_equal() -> None:
    assert fingerprint(TrainingSection(), 1) == fingerprint(TrainingSection(learning_rate=3e-6), 1)
    assert fingerprint(TrainingSection()) == fingerprint(TrainingSection().model_dump(mode="json"))
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint("ab", "c") != fingerprint("a", "bc")


def test_training_learning_rate_depends_on_adapters_where_it_is_open(load: Callable[..., Recipe]) -> None:
    lora = "training.lora={rank: 4}"
    assert load("training.learning_rate=null").study.training.learning_rate == 3e-6
    assert load("training.learning_rate=null", lora).study.training.learning_rate == 1e-4
    assert load("training.learning_rate=3e-6", lora).study.training.learning_rate == 3e-6
    assert load("training.learning_rate=2e-6").study.training.learning_rate == 2e-6


def test_fingerprint_of_training_without_adapters_is_pinned() -> None:
    """Of the settings that users' checkpoints were trained with."""
    assert fingerprint(TrainingSection()) == "c957856585ddc22f"
    assert fingerprint(TrainingSection(learning_rate=3e-6, lora=LoraSection())) == "cb492bce8a56d184"


@pytest.mark.parametrize("field", list(TrainingSection.model_fields))
def test_fingerprint_covers_every_training_setting(field: str) -> None:
    changed: dict[str, Any] = {
        "betas": (0.8, 0.95),
        "precision": "float32",
        "order": "fixed",
        "lora": LoraSection(),
    }
    value = getattr(TrainingSection(), field)
    other = changed.get(field) or (value + 1 if isinstance(value, int) else math.nextafter(value, 2))
    assert fingerprint(TrainingSection()) != fingerprint(TrainingSection(**{field: other}))


def test_runtime_defaults_to_one_worker() -> None:
    runtime = Runtime()
    assert (runtime.samplers.max, runtime.teachers.max, runtime.trainers.workers) == (1, 1, 1)
    assert ModelSection(path="m").trust_remote_code is False


# --- several hops, methods, sweeps, other tasks


@pytest.mark.parametrize(
    ("slot", "hops", "slots"),
    [
        ("first", 1, (0,)),
        ("last", 1, (19,)),
        ("first", 3, (0, 1, 2)),
        ("last", 2, (18, 19)),
        ("[7, 3]", 2, (7, 3)),
    ],
)
def test_study_advantageous_depends_on_hops(
    load: Callable[..., Recipe], slot: str, hops: int, slots: tuple[int, ...]
) -> None:
    recipe = load("data.format=jsonl", f"data.hops=[{hops}]", f"method.advantageous_slot={slot}")
    assert recipe.study.fixed_advantageous_slots(hops) == slots


def test_study_advantageous_auto_raises(load: Callable[..., Recipe]) -> None:
    with pytest.raises(ValueError, match="the advantageous slot is 'auto'"):
        load("method.advantageous_slot=auto").study.fixed_advantageous_slots(1)
    with pytest.raises(ValueError, match="the advantageous slot is 'random'"):
        load("method.advantageous_slot=random").study.fixed_advantageous_slots(1)


def test_study_several_numbers_of_hops_require_pairs(load: Callable[..., Recipe]) -> None:
    mixed = ("data.format=musique", "data.hops=[2, 3]")
    assert load(*mixed).study.data.hops == (2, 3)
    with pytest.raises(UserError, match=r"evaluation.slots: of several numbers of hops .* only 'pairs' are possible"):
        load(*mixed, "evaluation.slots=3")
    with pytest.raises(UserError, match=r"method.advantageous_slot: 'auto' requires one number of hops"):
        load(*mixed, "method.advantageous_slot=auto")
    with pytest.raises(UserError, match=r"inference.method: 'reorder' requires one number of hops \(data.hops\)"):
        load(*mixed, "inference.method=reorder")


def test_study_reorder_needs_slots_to_compare(load: Callable[..., Recipe]) -> None:
    with pytest.raises(
        UserError, match=r"method.auto_slots: 1, but inference.method 'reorder' compares at least 2 slots"
    ):
        load("inference.method=reorder", "method.auto_slots=1")
    with pytest.raises(UserError, match=r"method.auto_slots: 99 slots, but there are 20; lower it"):
        load("inference.method=reorder", "method.auto_slots=99")


def test_study_ms_poe_cannot_use_flash_attention(load: Callable[..., Recipe]) -> None:
    with pytest.raises(
        UserError, match=r"inference.method: 'ms_poe' cannot use flash_attention_2; set model.attention"
    ):
        load("inference.method=ms_poe", "model.engine=hf", "model.attention=flash_attention_2")


@pytest.mark.parametrize(
    ("name", "loss", "weights", "anchor", "teacher"),
    [
        ("r1", "kl", "paper", 1.0, True),
        ("kl+align", "kl", "paper", 0.0, True),
        ("kl", "kl", "uniform", 0.0, True),
        ("r1-on-policy", "kl", "paper", 1.0, True),
        ("r2", "ce", "uniform", 0.0, False),
        ("seqkd", "ce", "uniform", 0.0, False),
        ("sft", "ce", "uniform", 0.0, False),
    ],
)
def test_method_section_resolves_the_defaults_of_its_name(
    name: str, loss: str, weights: str, anchor: float, teacher: bool
) -> None:
    method = MethodSection(name=name)  # type: ignore[arg-type]
    resolved = (method.loss, method.weights, method.anchor_weight, method.needs_teacher)
    assert resolved == (loss, weights, anchor, teacher)


@pytest.mark.parametrize(
    ("settings", "teacher", "tokens"),
    [
        ({}, "cached", 0),
        ({"teacher": "resident"}, "resident", 0),
        ({"teacher": "topk"}, "topk", 64),
        ({"teacher": "topk", "teacher_topk": 8}, "topk", 8),
        ({"name": "seqkd"}, "none", 0),
        ({"name": "seqkd", "teacher": "topk"}, "none", 0),
        ({"name": "seqkd", "teacher": "topk", "teacher_topk": 8}, "none", 0),
        ({"name": "seqkd", "weights": "adaptive"}, "cached", 0),
    ],
)
def test_method_section_has_a_teacher_only_if_needed(settings: dict[str, Any], teacher: str, tokens: int) -> None:
    method = MethodSection(**settings)
    assert (method.teacher, method.teacher_topk) == (teacher, tokens)
    assert (method.teacher == "none") == (not method.needs_teacher)
    again = MethodSection.model_validate(method.model_dump())
    assert again == method


def test_method_section_null_leaves_a_setting_open() -> None:
    null = {"weights": None, "anchor_weight": None, "teacher": None, "teacher_topk": None, "auto_slots": None}
    assert MethodSection.model_validate(null) == MethodSection()
    assert EvaluationSection.model_validate({"slots": None, "other_slots": None, "seed": None}) == EvaluationSection()
    data = {"format": "jsonl", "path": "d"}
    assert DataSection.model_validate({**data, "metric": None, "train_candidates": None}) == DataSection(**data)


def test_method_section_rounds_are_those_of_its_name() -> None:
    assert (MethodSection().rounds, MethodSection(name="r1-on-policy").rounds) == (1, 2)
    assert MethodSection(name="r1-on-policy", rounds=1).rounds == 1
    assert MethodSection(k=3).responses_per_example == 1
    assert MethodSection(name="r1-on-policy", k=3).responses_per_example == 4
    assert MethodSection(name="r1-on-policy", k=3, anchor_weight=0.5).responses_per_example == 4
    assert MethodSection(name="r1-on-policy", k=3, anchor_weight=0).responses_per_example == 3


def test_study_keeps_wrong_answers_of_on_policy_methods(load: Callable[..., Recipe]) -> None:
    assert load("method.name=r1").study.sampling.keep == load("sampling.keep=null").study.sampling.keep == "correct"
    assert load("method.name=r1-on-policy").study.sampling.keep == "all"
    assert load("method.name=r1-on-policy", "sampling.keep=correct").study.sampling.keep == "correct"
    cells = sweep_cells(load("sweep.method.name=[r1, r1-on-policy]"))
    assert [cell.study.sampling.keep for _, cell in cells] == ["correct", "all"]


def test_study_refuses_a_choice_of_on_policy_answers(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"sampling.candidates: 4, but method 'r1-on-policy' learns from what the stud"):
        load("method.name=r1-on-policy", "sampling={candidates: 4, temperature: 1}")


def test_methods_table_has_every_name_once() -> None:
    assert list(METHODS) == list(get_args(MethodName))
    for name, spec in METHODS.items():
        assert spec.name == name
        assert spec.weights in spec.allowed_weights
        assert MethodSection(name=spec.name).spec is spec


def test_inference_methods_table_has_every_name_once_and_settings_that_exist() -> None:
    assert list(INFERENCE_METHODS) == list(get_args(InferenceMethodName))
    for name, spec in INFERENCE_METHODS.items():
        assert spec.name == name
        assert set(spec.settings) <= set(InferenceSection.model_fields)
    owned = {setting for spec in INFERENCE_METHODS.values() for setting in spec.settings}
    assert owned == set(InferenceSection.model_fields) - {"method"}


def test_sweep_cells_are_every_combination(load: Callable[..., Recipe]) -> None:
    recipe = load("sweep={method.name: [r1, sft], seed: [0, 1]}", "method.k=2")
    cells = sweep_cells(recipe)
    assert [(cell.study.method.name, cell.study.seed) for _, cell in cells] == [
        ("r1", 0),
        ("r1", 1),
        ("sft", 0),
        ("sft", 1),
    ]
    assert cells[2][0] == {"method.name": "sft", "seed": 0}
    assert all(cell.study.method.k == 2 and cell.storage == recipe.storage and not cell.sweep for _, cell in cells)


def test_sweep_cells_resolve_each_method_by_itself(load: Callable[..., Recipe]) -> None:
    cells = sweep_cells(load("sweep={method.name: [r1, seqkd], data.documents: [20, 6]}", "method.k=2"))
    resolved = [
        (cell.study.method.weights, cell.study.method.teacher, cell.study.method.auto_slots) for _, cell in cells
    ]
    assert resolved == [
        ("paper", "cached", 10),
        ("paper", "cached", 6),
        ("uniform", "none", 10),
        ("uniform", "none", 6),
    ]
    hops = sweep_cells(load("sweep={data.hops: [[1], [2]]}", "data.format=jsonl"))
    assert [cell.study.evaluation.slots for _, cell in hops] == ["all", "pairs"]


def test_sweep_cells_take_whole_sections(load: Callable[..., Recipe]) -> None:
    sections = "{inference: [{method: reorder}, {method: uniform_scale, scales: [1.5]}], seed: [0, 1]}"
    cells = sweep_cells(load(f"sweep={sections}", "inference.method=lpes", "inference.scales=[1, 2, 3]"))
    inference = [cell.study.inference for _, cell in cells]
    assert [(each.method, each.scales) for each in inference] == [
        *[("reorder", ())] * 2,
        *[("uniform_scale", (1.5,))] * 2,
    ]
    assert [settings["seed"] for settings, _ in cells] == [0, 1, 0, 1]
    # As they are written, since they name the studies in reports: paths are not made absolute.
    written = [{"path": "examples/toy/base"}, {"path": "examples/toy/base", "max_length": 900}]
    recipe = load(f"sweep={{model: {written}}}")
    assert [settings["model"] for settings, _ in sweep_cells(recipe)] == written


def test_sweep_cells_keep_what_a_section_does_not_name(load: Callable[..., Recipe]) -> None:
    recipe = load("sweep={method: [{name: r1}, {name: seqkd, k: 3}]}", "method.k=2", "method.advantageous_slot=last")
    methods = [cell.study.method for _, cell in sweep_cells(recipe)]
    assert [(each.name, each.k, each.advantageous_slot) for each in methods] == [
        ("r1", 2, "last"),
        ("seqkd", 3, "last"),
    ]
    # Those that the recipe leaves open are each method's own.
    assert [each.weights for each in methods] == ["paper", "uniform"]


def test_sweep_cells_keep_the_settings_of_inference_methods(load: Callable[..., Recipe]) -> None:
    """But for scales, which two methods have. Within a section too."""
    recipe = load(
        "sweep={inference: [{method: none}, {method: lpes, search: {examples: 40}}, {method: ms_poe}]}",
        "inference.search.generations=3",
        "inference.ms_poe.largest=1.5",
        "model.engine=hf",
    )
    inference = [cell.study.inference for _, cell in sweep_cells(recipe)]
    assert [(each.search.generations, each.ms_poe.largest) for each in inference] == [(3, 1.5)] * 3
    assert inference[1].search.examples == 40


def test_sweep_cells_know_which_precisions_the_cpu_decides(load: Callable[..., Recipe]) -> None:
    (_, auto), (_, chosen) = sweep_cells(
        load("sweep={training.precision: [auto, float32]}", "model.dtype=auto", "runtime.trainers.strategy=torch")
    )
    assert set(auto.auto_precisions) == {"model.dtype", "training.precision"}
    assert set(chosen.auto_precisions) == {"model.dtype"}


def test_sweep_cells_of_a_recipe_made_in_python(load: Callable[..., Recipe]) -> None:
    loaded = load()
    recipe = Recipe(name="made", description="d", study=loaded.study, sweep={"seed": (0, 1)})
    assert [cell.study.seed for _, cell in sweep_cells(recipe)] == [0, 1]
    assert sweep_cells(recipe)[0][1].study == loaded.study


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("{method.nme: [r1]}", "sweep: method.nme: not a setting of a study; did you mean 'method.name'?"),
        ("{runtime.storage: [a, b]}", "sweep: runtime.storage: not a setting of a study"),
        ("{evaluation.also_evaluate: [[x]]}", "sweep: evaluation.also_evaluate: not a setting of a study"),
        ("{seed: []}", "sweep: seed: expected at least one value"),
        ("{seed: [0, 1, 0]}", "sweep: {'seed': 0} is the same study as an earlier one; list each value once"),
        ("{method.k: [2, 30]}", "sweep: method.k: 30 trivial slots, but"),
        ("{method.k: 4}", "sweep: method.k: input should be a list, for example [4]"),
        ("{method: {name: [r2, sft]}}", "sweep: method: write method.name: [...]"),
        ("{training: {lora: {rank: [4, 8]}}}", "sweep: training: write training.lora.rank: [...]"),
        ("[seed]", "sweep: input should be a mapping, got ['seed']"),
        ("{evaluation: [{slots: 2}]}", "sweep: evaluation: not a setting of a study"),
        ("{model.rope_scales: [[1.5]]}", "sweep: model.rope_scales: filled in from inference.scales; set those"),
        ("{model: [{path: m, rope_scales: [2]}]}", "sweep: model.rope_scales: filled in from inference.scales; set th"),
        ("{inference: [lpes]}", "sweep: inference: expected a section with fields, such as method: lpes, got 'lpes'"),
        (
            "{method: [{name: r1}], method.k: [2, 4]}",
            "sweep: method: is swept as a section, and so is its setting method.k; name one of them",
        ),
        ("{inference: [{method: uniform_scale}]}", "sweep: inference.scales: 'uniform_scale' needs one number"),
    ],
)
def test_sweep_cells_reports_a_bad_sweep(load: Callable[..., Recipe], sweep: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        sweep_cells(load(f"sweep={sweep}"))
    assert message in str(caught.value)


def test_load_recipe_reads_other_tasks(load: Callable[..., Recipe]) -> None:
    recipe = load("evaluation.also_evaluate=[quickstart]", "data.eval_fraction=0.25")
    assert recipe.other_tasks == {"quickstart": load_recipe("quickstart").study}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("[quickstrt]", "evaluation.also_evaluate: quickstrt: no such recipe; did you mean 'quickstart'?"),
        (
            "[quickstart]",
            "evaluation.also_evaluate: quickstart: its data.eval_fraction is 0.25, here it is 0.5; they must",
        ),
        ("[nq_llama3_8b, nq_llama3_8b]", "evaluation.also_evaluate: two recipes are called nq_llama3_8b"),
    ],
)
def test_load_recipe_refuses_an_unusable_other_task(load: Callable[..., Recipe], names: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(f"evaluation.also_evaluate={names}")
    assert str(caught.value).startswith(message)


def test_load_recipe_overrides_a_sweep(load: Callable[..., Recipe]) -> None:
    assert load("sweep.method.k=[1, 2]", "sweep.seed=[0, 1]").sweep == {"method.k": (1, 2), "seed": (0, 1)}


def test_sweep_cells_make_paths_absolute(
    load: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = sweep_cells(load("sweep.data.path=[a.jsonl, b.jsonl]"))
    assert [cell.study.data.path for _, cell in cells] == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert [cell.written_paths["data.path"] for _, cell in cells] == ["a.jsonl", "b.jsonl"]


def test_sweep_cells_keep_the_paths_as_they_were_written() -> None:
    recipe = load_recipe("quickstart", ["sweep={model: [{path: ./a}, {dtype: float32}], seed: [0]}"])
    written = [cell.written_paths for _, cell in sweep_cells(recipe)]
    assert written == [{**recipe.written_paths, "model.path": "./a"}, recipe.written_paths]


def test_evaluation_default_slots_depend_on_hops(load: Callable[..., Recipe]) -> None:
    one, two = load().study, load("data.format=musique", "data.hops=[2]").study
    assert (one.evaluation.slots, one.evaluation.other_slots) == ("all", 10)
    assert (two.evaluation.slots, two.evaluation.other_slots) == ("pairs", "pairs")
    null = load("data.format=musique", "data.hops=[2]", "evaluation.slots=null").study
    assert null.evaluation == two.evaluation


def test_evaluation_refuses_fewer_slots_than_hops(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"evaluation.slots: 1 slots cannot hold 2 gold documents"):
        load("data.format=musique", "data.hops=[2]", "evaluation.slots=1")
    with pytest.raises(UserError, match=r"evaluation.other_documents: 4 leaves no distractor"):
        load("data.format=musique", "data.hops=[4]", "evaluation.other_documents=[4]")


def test_method_auto_slots_of_two_hops_are_one_less(load: Callable[..., Recipe]) -> None:
    auto = ("data.format=musique", "data.hops=[2]", "method.advantageous_slot=auto")
    assert load(*auto, "method.auto_slots=19").study.method.auto_slots == 19
    with pytest.raises(UserError, match=r"method.auto_slots: 20 slots, but there are 19"):
        load(*auto, "method.auto_slots=20")


def test_method_auto_slots_are_all_placements_of_few_documents(load: Callable[..., Recipe]) -> None:
    """Two adjacent gold documents among six have five placements."""
    settings = ["data.format=musique", "data.hops=[2]", "data.documents=6", "method.k=2"]
    assert load(*settings, "method.advantageous_slot=auto").study.method.auto_slots == 5


def test_method_k_is_at_most_the_trivial_placements_of_the_fewest_hops(load: Callable[..., Recipe]) -> None:
    """Two of four documents in order have 12 placements, one of them advantageous; three have 24."""
    settings = ["data.format=musique", "data.hops=[2, 3]", "data.documents=4"]
    assert load(*settings, "method.k=11").study.method.k == 11
    with pytest.raises(UserError, match=r"method.k: 12 trivial slots, but 4 documents have 11; lower method.k"):
        load(*settings, "method.k=12")


def test_evaluation_default_slots_are_at_most_those_available(load: Callable[..., Recipe]) -> None:
    study = load("data.documents=8", "method.advantageous_slot=auto", "evaluation.other_documents=[6]").study
    assert (study.method.auto_slots, study.evaluation.other_slots) == (8, 6)
    assert Study.model_validate(study.model_dump()) == study  # what a dry run shows is a recipe


def test_trainers_max_workers_above_workers_is_valid(make_recipe: Callable[..., Recipe]) -> None:
    trainers = {"strategy": "zero3", "workers": 1, "max_workers": 2}
    assert make_recipe(runtime={"trainers": trainers}).runtime.trainers.max_workers == 2


def test_recipe_refuses_zero3_that_rounds_the_model(make_recipe: Callable[..., Recipe]) -> None:
    settings: dict[str, Any] = {"training": {"precision": "bfloat16"}, "model": {"dtype": "float32"}}
    assert make_recipe(**settings).study.training.precision == "bfloat16"  # torch keeps float32 weights
    with pytest.raises(UserError, match=r"training.precision: zero3 would round the float32 weights of model.dtype"):
        make_recipe(**settings, runtime={"trainers": {"strategy": "zero3"}})


def test_study_refuses_a_batch_smaller_than_one_example(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"training.global_batch_rows: 3 rows cannot hold one example, which needs 4"):
        make_recipe(training={"global_batch_rows": 3})
    # R2 has no row at the advantageous slot.
    r2: dict[str, Any] = {"method": {"name": "r2", "k": 3}, "training": {"global_batch_rows": 3}}
    assert make_recipe(**r2).study.method.rows_per_example == 3
    with pytest.raises(UserError, match=r"2 rows cannot hold one example, which needs 3 rows \(method.k\)"):
        make_recipe(method=r2["method"], training={"global_batch_rows": 2})


def test_trainers_refuse_max_workers_below_workers(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"max_workers: 1 is less than workers, 2"):
        make_recipe(runtime={"trainers": {"strategy": "zero3", "workers": 2, "max_workers": 1}})


def test_recipe_refuses_tensor_parallel_size_unlike_gpus(make_recipe: Callable[..., Recipe]) -> None:
    def load(gpus: float, parts: int) -> Recipe:
        return make_recipe(
            model={"engine": "vllm"},
            runtime={"samplers": {"gpus": gpus}, "vllm": {"tensor_parallel_size": parts}},
        )

    assert load(2, 2).runtime.vllm.tensor_parallel_size == 2
    assert load(0.5, 1).runtime.samplers.gpus == 0.5
    for gpus, parts in ((1, 2), (4, 1), (0.5, 2)):
        message = (
            rf"tensor_parallel_size: {parts}, but one sampler has {gpus:g} GPUs \(runtime.samplers.gpus\); set both"
        )
        with pytest.raises(UserError, match=message):
            load(gpus, parts)


def test_load_recipe_lowers_the_default_slots_of_a_search_to_those_of_a_prompt() -> None:
    overrides = ["inference.method=lpes", "data.documents=2", "evaluation.slots=2", "method.k=1"]
    assert load_recipe("nq_mistral_7b", overrides).study.inference.search.slots == 3
    with pytest.raises(UserError, match=r"inference.search.slots: 4 slots, but there are 2; lower it"):
        load_recipe("nq_mistral_7b", [*overrides, "inference.search.slots=4"])


@pytest.mark.parametrize(
    "name", ["model.chat_template_kwargs={thinking: false}", "model.chat_template_kwargs.thinking=no"]
)
def test_chat_template_kwargs_are_a_part_of_the_model(load: Callable[..., Recipe], name: str) -> None:
    study = load(name).study
    assert study.model.chat_template_kwargs == {"thinking": False}
    assert study.model.model_dump(mode="json")["chat_template_kwargs"] == {"thinking": False}
    # Sections are keys of caches.
    assert hash(study) == hash(load(name).study)
    assert study.model != load().study.model
    assert pickle.loads(pickle.dumps(study)) == study


def test_chat_template_kwargs_are_in_no_dump_where_there_are_none(load: Callable[..., Recipe]) -> None:
    """So that earlier fingerprints stay."""
    for settings in ([], ["model.chat_template_kwargs={}"]):
        assert "chat_template_kwargs" not in load(*settings).study.model_dump_json()


def test_chat_template_kwargs_can_be_swept(load: Callable[..., Recipe]) -> None:
    recipe = load("sweep={model.chat_template_kwargs: [{thinking: true}, {thinking: false}]}")
    cells = [cell.study.model.chat_template_kwargs for _, cell in sweep_cells(recipe)]
    assert cells == [{"thinking": True}, {"thinking": False}]
