import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pos2distill.config import (
    Recipe,
)
from pos2distill.config.load import load_recipe, make_recipe
from pos2distill.config.read import recipe_names
from pos2distill.errors import UserError
from tests.support.recipes import MINIMAL_RECIPE


def test_make_recipe_does_not_change_its_argument() -> None:
    sections = copy.deepcopy(MINIMAL_RECIPE)
    recipe = make_recipe(sections, ["model.path=other", "data.path=x.jsonl", "sweep.seed=[0, 1]"])
    assert (recipe.study.model.path, recipe.storage) == ("other", str(Path("runs/small").absolute()))
    assert sections == MINIMAL_RECIPE


def test_load_recipe_accepts_every_built_in_recipe() -> None:
    names = recipe_names()
    assert "quickstart" in names
    assert [load_recipe(name).name for name in names] == names


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
        ("lerning_rate=1", "lerning_rate: unknown field; did you mean 'training.learning_rate'?"),
        ("slot=3", "slot: unknown field; did you mean 'evaluation.slots'?"),
        ("mode=staged", "mode: unknown field; did you mean 'runtime.mode'?"),
        ("data.candidates=2", "data.candidates: unknown field; did you mean 'sampling.candidates'?"),
        ("data.max_new_token=3", "data.max_new_token: unknown field; did you mean 'evaluation.max_new_tokens'?"),
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
        ("model.name=x", "model.name: unknown field; did you mean 'model.path'?"),
        ("data.name=x", "data.name: unknown field; did you mean 'data.path'?"),
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
        ("model.path=null", "model.path: input should be a valid string, got nothing"),
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
            "method={name: seqkd, divergence: reverse}",
            "method.divergence: 'reverse' applies to KL losses only; method 'seqkd' has loss 'ce'",
        ),
        (
            "method={name: r1, teacher: topk, divergence: reverse}",
            "method.divergence: 'reverse' needs the teacher's probability of every token, and teacher 'topk' has some",
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
            "method.alignment: 'official' distills one position after the response's end, where the sampler knows no",
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
            "inference.scales: 'uniform_scale' needs one number, for example [1.1], got none",
        ),
        (
            "inference={method: uniform_scale, scales: [1.5, 2]}",
            "inference.scales: 'uniform_scale' needs one number, for example [1.1], got 2 numbers",
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
            "inference.scales: 'lpes' needs one for each layer, got 1 number; for one scale, set",
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
            "runtime={executor: local, trainers: {strategy: torch, workers: 2}}",
            "runtime.trainers.workers: 2 require runtime.executor ray; set 1",
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


def test_load_recipe_reports_a_misspelled_field_first(load: Callable[..., Recipe]) -> None:
    with pytest.raises(UserError, match=r"data\.pth: unknown field; did you mean 'path'\?"):
        load(data={"format": "nq", "pth": "data.jsonl"})


@pytest.mark.parametrize(
    ("section", "message"),
    [("model", "small.yaml: model: missing"), ("data", "small.yaml: data: missing")],
)
def test_load_recipe_names_a_missing_section(tmp_path: Path, section: str, message: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in MINIMAL_RECIPE.items() if key != section}))
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
def test_load_recipe_rejects_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
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
    with pytest.raises(UserError, match=r"^quickstart.yaml: no such file; did you mean 'quickstart'\?$"):
        load_recipe("quickstart.yaml")


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


def test_load_recipe_rejects_a_data_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    with pytest.raises(
        UserError, match=r"rows.jsonl: expected a recipe, a file named \*.yaml; data goes to data.path$"
    ):
        load_recipe(str(path))


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
def test_load_recipe_rejects_an_unusable_other_task(load: Callable[..., Recipe], names: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(f"evaluation.also_evaluate={names}")
    assert str(caught.value).startswith(message)
