"""Wrong input of every kind: exit code 2, one line that names it, within seconds, and nothing left behind."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import socket
import tempfile
import time
import urllib.error
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from s3fs import S3FileSystem
from safetensors.numpy import load_file, save_file

from pipelines.cli import command_line
from pos2distill.config import Recipe, Study
from pos2distill.config.validation import dotted_names
from tests.support.hub_server import hub_server, use_hub
from tests.support.privileges import respecting_modes
from tests.support.tiny import write_examples

Rejected = Callable[..., str]
_SECONDS = 20.0


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Path:
    make_recipe()
    return tmp_path / "recipe.yaml"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files, which must be empty again."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def rejected(recipe: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> Rejected:
    """`rejected(*settings)`: the line with which `study RECIPE *settings --dry-run` is rejected."""

    def run(*settings: str, path: str = str(recipe)) -> str:
        capsys.readouterr()
        start = time.monotonic()
        code = command_line.main(["study", path, *settings, "--dry-run"])
        printed = capsys.readouterr()
        assert time.monotonic() - start < _SECONDS
        lines = [line for line in printed.err.splitlines() if not line.startswith("warning: ")]
        assert (code, printed.out, len(lines)) == (2, "", 1), printed
        assert lines[0].startswith("error: ")
        assert len(lines[0]) < 1000
        assert not (recipe.parent / "storage").exists()
        return lines[0]

    return run


def test_the_recipe_of_these_tests_is_right(recipe: Path, temporary: Path) -> None:
    assert command_line.main(["study", str(recipe), "--dry-run"]) == 0


SETTINGS = [
    # Paths that would become folders of odd names.
    ("runtime.storage=s3:/bucket/x", "runtime.storage: s3:/bucket/x: expected a URL such as s3://bucket/x"),
    ("runtime.storage=S3://bucket/x", "runtime.storage: S3://bucket/x: expected a URL such as s3://bucket/x"),
    ("runtime.storage=s3://bucket//x", "runtime.storage: s3://bucket//x: expected single slashes in the path of a URL"),
    ("runtime.storage=q::r", "runtime.storage: q::r: '::' joins file systems in URLs, so no path may have it"),
    ("data.path=a::b.jsonl", "data.path: a::b.jsonl: '::' joins file systems in URLs, so no path may have it"),
    ("data.path=https:/host/x.jsonl", "data.path: https:/host/x.jsonl: expected a URL such as https://host/x.jsonl"),
    ("runtime.storage=$HOME/x", "runtime.storage: $HOME/x: variables are not replaced here; write the path itself"),
    ("data.path=${DATA}/x.jsonl", "data.path: ${DATA}/x.jsonl: variables are not replaced here"),
    # Numbers out of their range.
    ("training.betas=[5,-3]", "training.betas: input should be"),
    ("training.betas=[0.9,1.0]", "less than 1, got 1"),
    ("training.betas=[0.9]", "training.betas: too few values, [0.9]"),
    ("training.betas=[0.9,0.95,0.99]", "training.betas: "),
    ("training.betas=0.9", "training.betas: input should be a list"),
    ("training.epochs=true", "training.epochs: input should be a number, got true"),
    ("evaluation.slots=true", "evaluation.slots: input should be a number, got true"),
    ("evaluation.slots=[[true]]", "evaluation.slots: input should be a number, got true"),
    ("evaluation.slots=[true, 2]", "evaluation.slots: input should be a number, got true"),
    ("method.advantageous_slot=true", "method.advantageous_slot: input should be a number, got true"),
    ("training.epochs=0", "training.epochs: input should be greater than or equal to 1, got 0"),
    ("training.epochs=1.5", "training.epochs: "),
    ("training.epochs=many", "training.epochs: input should be a valid integer"),
    ("training.epochs=", "training.epochs: no value after '='; write null for none"),
    ("training.epochs=[1]", "training.epochs: "),
    ("training.epochs={a: 1}", "training.epochs: "),
    ("training.learning_rate=0", "training.learning_rate: input should be greater than 0"),
    ("training.learning_rate=-1", "training.learning_rate: input should be greater than 0"),
    ("training.learning_rate=.nan", "training.learning_rate: input should be a finite number"),
    ("training.learning_rate=.inf", "training.learning_rate: input should be a finite number"),
    ("training.learning_rate=false", "training.learning_rate: input should be a number, got false"),
    ("training.weight_decay=-0.1", "training.weight_decay: "),
    ("training.warmup_ratio=1", "training.warmup_ratio: input should be less than 1"),
    ("training.min_lr_ratio=2", "training.min_lr_ratio: "),
    ("training.max_grad_norm=0", "training.max_grad_norm: "),
    ("training.global_batch_rows=3", "global_batch_rows: 3 rows cannot hold one example"),
    ("training.order=random", "training.order: input should be 'arrival' or 'fixed'"),
    ("training.precision=fp16", "training.precision: "),
    ("training.lora.rank=0", "training.lora.rank: "),
    ("training.lora.rank=100000", "training.lora.rank: 100000, but the adapted layers of "),
    ("training.lora={rank: 17, targets: [k_proj]}", " have at most rank 16; lower it"),
    ("training.lora.targets=[]", "training.lora.targets: expected at least one linear layer"),
    ("training.lora.targets=[q_prj]", "did you mean 'q_proj'?"),
    ("training.lora=16", "training.lora: expected a section with fields"),
    ("sampling.temperature=-1", "sampling.temperature: "),
    ("sampling.top_p=0", "sampling.top_p: input should be greater than 0"),
    ("sampling.top_p=1.1", "sampling.top_p: "),
    ("data.documents=1000000000", "data.documents: input should be less than or equal to 100000"),
    ("sampling.max_new_tokens=0", "sampling.max_new_tokens: "),
    ("sampling.max_new_tokens=512", "sampling.max_new_tokens: 512, but prompt and response together may have 512"),
    ("evaluation.max_new_tokens=9999999", "evaluation.max_new_tokens: 9999999, but prompt and response together"),
    ("sampling.keep=some", "sampling.keep: "),
    ("data.documents=1", "data.documents: "),
    ("data.documents=7", "line 1: documents: found 6, but prompts of 7 slots are asked for"),
    ("data.train_examples=0", "data.train_examples: "),
    (
        "data.eval_examples=999999999",
        "data.eval_examples (or --examples with --model) asks for 999999999",
    ),
    ("data.eval_fraction=0", "data.eval_fraction: "),
    (
        "data.eval_fraction=1",
        "0 train examples, but data.train_examples asks for 8; lower it or change data.eval_fraction",
    ),
    ("data.eval_fraction=1.5", "data.eval_fraction: "),
    (
        "model.engine=openai runtime.endpoint.base_url=http://127.0.0.1:9/v1",
        "model.engine: 'openai' is for",
    ),
    ("data.hops=[]", "data.hops: "),
    ("data.hops=[9]", "data.hops: "),
    ("data.hops=[1,2]", "data.hops: one hop and several cannot be mixed"),
    ("data.metric=em data.prompt=qa", "data.metric: 'em', but prompt 'qa' does not ask for"),
    ("data.format=json", "data.format: "),
    ("data.format=nq_oracle", "(those of data.format=jsonl)"),
    ("data.prompt=chat", "data.prompt: "),
    ("data.prompt=template", "data.prompt: 'template' needs the section data.template"),
    (
        "data.template.user={documents}{question}",
        "data.template.user: cannot read the value",
    ),
    ("data.template={user: '{documents} {question}'}", "data.prompt: 'plain', but data.template is the prompt; leave"),
    ("data.template={user: '{documents}'}", "data.template.user: has no {question}, and neither has system"),
    ("data.template={user: '{context} {question}'}", "data.template.user: unknown field {context}; expected one of"),
    ("data.template={user: '{question} {documents}', document: '{titel}'}", "{titel}; did you mean 'title'?"),
    ("data.template={user: '{question} {documents}', documnt: x}", "documnt: unknown field; did you mean 'document'?"),
    ("data.distractors=none", "data.distractors: "),
    ("method.name=r3", "method.name: "),
    ("method.k=-1", "method.k: "),
    ("method.k=4", "method.k: 4 trivial slots, but 4 documents have 3"),
    ("method.advantageous_slot=4", "advantageous_slot: 4 is not one of the slots 0 to 3"),
    ("method.advantageous_slot=-1", "advantageous_slot: -1 is not one of the slots"),
    ("method.advantageous_slot=middle", "method.advantageous_slot: "),
    ("method.anchor_weight=-1", "method.anchor_weight: "),
    ("method.weights=uneven", "method.weights: "),
    ("method.teacher=topk method.teacher_topk=301", "method.teacher_topk: 301, but"),
    ("method.auto_slots=0", "method.auto_slots: "),
    ("method.view=shift", "method.view: input should be 'none', 'skip', 'cyclic' or 'pose', got 'shift'"),
    ("method.view=skip", "method.view: 'skip' is for cross-entropies with uniform weights, not for method 'r1'"),
    ("method.name=seqkd method.view=pose", "method.view: shifted rows need 1024 positions, "),
    ("method.view_weight=0", "method.view_weight: input should be greater than 0"),
    ("method.rounds=2", "method.rounds: 2, but method 'r1' samples once"),
    ("method.name=r1-on-policy method.rounds=0", "method.rounds: input should be greater than or equal to 1"),
    ("method.divergence=backward", "method.divergence: input should be 'forward' or 'reverse', got 'backward'"),
    ("method.name=sft method.divergence=reverse", "method.divergence: 'reverse' applies to KL losses only; method"),
    ("method.teacher=topk method.divergence=reverse", "method.divergence: 'reverse' needs the teacher's probability"),
    ("method.name=r1-on-policy method.teacher_slot=best", "method.teacher_slot: input should be 'advantageous' or"),
    (
        "method.name=sft method.teacher_slot=random",
        "method.teacher_slot: 'random', but the loss of method 'sft' has no",
    ),
    ("method.teacher=topk method.teacher_slot=random", "method.teacher_slot: 'random', but teacher 'topk' knows the"),
    ("method.name=r1-on-policy method.teacher=topk", "method.teacher: 'topk' stores what the sampler knows"),
    ("method.name=r1-on-policy method.rounds=1000000", "method.rounds: input should be less than or equal to 100"),
    ("sampling.candidates=1000000000", "sampling.candidates: input should be less than or equal to 1000"),
    ("sampling.candidates=0", "sampling.candidates: input should be greater than or equal to 1"),
    ("sampling.candidates=4 sampling.temperature=0", "sampling.candidates: 4 greedy responses would all be the same"),
    ("evaluation.slots=[9]", "evaluation.slots: 9 is not one of the slots 0 to 3"),
    ("evaluation.slots=[0,0]", "evaluation.slots: expected at least one slot, each of them once"),
    ("evaluation.slots=[]", "evaluation.slots: expected at least one slot"),
    ("evaluation.slots=9", "evaluation.slots: 9 slots, but there are 4"),
    ("evaluation.other_documents=[4]", "evaluation.other_documents: 4 leaves no distractor"),
    ("evaluation.other_documents=[7]", "line 1: documents: found 6, but prompts of 7 slots"),
    ("evaluation.bootstrap_samples=1", "evaluation.bootstrap_samples: "),
    (
        "evaluation.bootstrap_samples=1000000000",
        "evaluation.bootstrap_samples: input should be less than or equal to 100000",
    ),
    ("evaluation.also_evaluate=[nothing]", "evaluation.also_evaluate: nothing: no such recipe"),
    ("evaluation.also_evaluate=[RECIPE]", "is this recipe itself; leave it out"),
    ("evaluation.also_evaluate=RECIPE", "evaluation.also_evaluate: input should be a list"),
    ("seed=-1", "seed: input should be greater than or equal to 0"),
    ("seed=x", "seed: "),
    ("inference.method=magic", "inference.method: "),
    (
        "inference.method=uniform_scale",
        "command line: inference.scales: 'uniform_scale' needs one number, for example [1.1], got none",
    ),
    ("inference.method=uniform_scale inference.scales=[1.5,2]", "inference.scales: 'uniform_scale' needs one number"),
    ("inference.method=uniform_scale inference.scales=[0]", "inference.scales: input should be greater than or equal"),
    ("inference.method=lpes inference.scales=[1.5]", "inference.scales: 'lpes' needs one for each layer"),
    ("inference.method=lpes inference.scales=[1,1.5,2]", "inference.scales: 3 scales, but"),
    ("inference.method=lpes inference.scales=[1,.nan]", "inference.scales: input should be a finite number"),
    (
        "inference.scales=[1.5]",
        "inference.scales: method 'none' has none; set inference.method to uniform_scale or lpes",
    ),
    ("inference.bases=[1]", "inference.bases: expected at least 2 in the list, got [1]"),
    ("inference.bases=[1,17]", "inference.bases: input should be less than or equal to 16, got 17"),
    ("inference.method=ms_poe model.engine=vllm", "inference.method: 'ms_poe' changes attention in a way that vLLM"),
    ("inference.method=attention_buckets model.engine=vllm", "inference.method: 'attention_buckets' changes attention"),
    ("inference.method=ms_poe inference.ms_poe.smallest=3", "ms_poe.smallest: 3 is above largest"),
    ("inference.ms_poe.largest=99", "inference.ms_poe.largest: input should be less than or equal to 16"),
    ("inference.ms_poe.spacing=even", "inference.ms_poe.spacing: input should be 'closed' or 'released', got 'even'"),
    ("inference.ms_poe.first_layer=-1", "inference.ms_poe.first_layer: input should be greater than or equal to 0"),
    ("inference.method=ms_poe inference.ms_poe.first_layer=2", "inference.ms_poe.first_layer: 2, but"),
    ("inference.method=ms_poe inference.ms_poe.ranking=best", "inference.ms_poe.ranking: "),
    ("inference.method=lpes inference.search.slots=5", "inference.search.slots: 5 slots, but there are 4; lower it"),
    ("inference.method=lpes inference.search.control_points=1", "inference.search.control_points: "),
    ("inference.method=lpes inference.search.control_points=101", "inference.search.control_points: "),
    ("inference.method=lpes inference.search.curve=spline", "inference.search.curve: "),
    (
        "inference.search.strategy=annealing",
        "inference.search.strategy: input should be 'genetic', 'random' or 'uniform'",
    ),
    ("inference.search.monotone=maybe", "inference.search.monotone: input should be true or false, got 'maybe'"),
    ("inference.search.smallest=0", "inference.search.smallest: input should be greater than or equal to 0.25"),
    ("inference.search.smallest=2", "inference.search.smallest: 2 is not below largest (2)"),
    ("inference.search.largest=.inf", "inference.search.largest: input should be a finite number"),
    ("inference.search.gamma=-1", "inference.search.gamma: input should be greater than or equal to 0"),
    ("inference.search.examples=0", "inference.search.examples: input should be greater than or equal to 1"),
    ("inference.search.slots=1", "inference.search.slots: input should be greater than or equal to 2"),
    ("inference.search.generations=0", "inference.search.generations: input should be greater than or equal to 1"),
    ("inference.search.generations=1000000000", "inference.search.generations: input should be less than or equal to"),
    ("inference.search.population=1", "inference.search.population: input should be greater than or equal to 2"),
    ("inference.search.parents=0", "inference.search.parents: input should be greater than or equal to 1"),
    ("inference.search.parents=65", "inference.search.parents: 65, but a population of 64; lower parents"),
    ("inference.search.mutations=-1", "inference.search.mutations: input should be greater than or equal to 0"),
    ("inference.search.crossovers=-1", "inference.search.crossovers: input should be greater than or equal to 0"),
    ("inference.search={mutations: 0, crossovers: 0}", "inference.search.mutations: 0, and no crossovers"),
    ("inference.search.mutation_rate=0", "inference.search.mutation_rate: input should be greater than 0"),
    ("inference.search.mutation_step=0", "inference.search.mutation_step: input should be greater than 0"),
    ("inference.method=reorder method.auto_slots=1", "method.auto_slots: 1, but inference.method 'reorder'"),
    ("model.rope_scales=[2]", "model.rope_scales: filled in from inference.scales"),
    ("model.dtype=float16", "model.dtype: "),
    ("model.engine=sglang", "model.engine: "),
    ("model.chat_template_kwargs=off", "model.chat_template_kwargs: input should be a mapping, got False"),
    ("model.chat_template_kwargs={day: 2020-01-01}", "model.chat_template_kwargs: "),
    (
        "model.chat_template_kwargs.enable_thinking=false",
        "model.chat_template_kwargs: enable_thinking: the chat template of",
    ),
    (
        "model.chat_template_kwargs={contnt: x}",
        "contnt: the chat template of",
    ),
    ("model.attention=flash", "model.attention: "),
    ("model.attention=flash_attention_2", "runtime.samplers.gpus and runtime.trainers.gpus are 0"),
    ("model.max_length=0", "model.max_length: "),
    ("model.max_length=16", "exceed the model's context of 16"),
    ("model.max_length=200", "tokens (4 documents) + 8 for the response exceed the model's context of 200"),
    ("model.revision=main", "is not a hub name and has no revisions"),
    ("runtime.samplers.min=3", "runtime.samplers.min: 3 is more than max, 1"),
    ("runtime.samplers.gpus=-1", "runtime.samplers.gpus: "),
    ("runtime.samplers.batch_size=0", "runtime.samplers.batch_size: "),
    ("runtime.executor=local runtime.trainers.workers=2", "runtime.trainers.workers: 2 require runtime.executor ray"),
    ("runtime.trainers.strategy=fsdp", "runtime.trainers.strategy: "),
    ("runtime.trainers.micro_batch_tokens=0", "micro_batch_tokens: "),
    ("runtime.checkpoints.minutes=0", "runtime.checkpoints.minutes: "),
    ("runtime.checkpoints.keep=0", "runtime.checkpoints.keep: "),
    ("runtime.max_failed_fraction=1.1", "runtime.max_failed_fraction: "),
    ("runtime.trackers=[comet]", "runtime.trackers"),
    ("runtime.trackers=wandb", "runtime.trackers: input should be a list"),
    ("runtime.executor=spark", "runtime.executor: "),
    ("runtime.mode=batch", "runtime.mode: "),
    # Names and values that are not what they should be.
    ("training.epoch=1", "training.epoch: unknown field; did you mean 'epochs'?"),
    ("epochs=1", "epochs: unknown field; did you mean 'training.epochs'?"),
    ("trainig.epochs=1", "trainig: unknown field; did you mean 'training'?"),
    ("training", "training: expected section.field=value"),
    ("=1", "=1: expected section.field=value"),
    ("training=1", "training: expected a section with fields"),
    ("training.epochs.x=1", "training.epochs.x: "),
    ("name=Has Spaces", "name: "),
    ("name=../up", "name: "),
    ("description=[1]", "description: input should be a valid string"),
    ("training.epochs=[", "training.epochs: cannot read the value: not valid YAML: line 2: did not find expected"),
    ("training.epochs=" + "[" * 3000, "training.epochs: cannot read the value: line 1: more than 100 nested levels"),
    ("training.epochs=" + "9" * 5000, "training.epochs: cannot read the value"),
    ("training.epochs=2020-02-32", "training.epochs: cannot read the value"),
    ("training.epochs=!!python/object:os.system 1", "training.epochs: cannot read the value"),
    ("training.epochs={a: 1, a: 2}", "training.epochs: cannot read the value"),
    ("seed=999999999999999999999999999999", "seed: input should be less than 9223372036854775808"),
    # Sweeps.
    ("sweep.training.epoch=[1]", "sweep: training.epoch: not a setting of a study; did you mean 'training.epochs'?"),
    ("sweep.training.epochs=[]", "sweep: training.epochs: expected at least one value"),
    ("sweep.training.epochs=3", "sweep"),
    ("sweep.training.epochs=[0]", "sweep: training.epochs: "),
    ("sweep.training.epochs=[1,1]", "is the same study as an earlier one"),
    (f"sweep.seed={list(range(1001))}", "sweep: 1001 studies; at most 1000 are possible"),
    ("sweep={training: {epochs: [1]}}", "sweep: training: write training.epochs: [...]"),
    ("sweep={data.path: [nowhere.jsonl]}", "nowhere.jsonl: no such file (data.path)"),
    # Paths.
    ("data.path=nowhere.jsonl", "nowhere.jsonl: no such file (data.path)"),
    ("data.path=~/nowhere-at-all.jsonl", f"{Path.home()}/nowhere-at-all.jsonl: no such file (data.path)"),
    ("data.path=~nobody-of-this-name/x.jsonl", "~nobody-of-this-name/x.jsonl: no such file (data.path)"),
    ("data.path=FOLDER", "Is a directory) (data.path); expected a file, not a folder"),
    ("data.path=FOLDER/data.jsonl/inside", "Not a directory"),
    ("data.path=FOLDER/dta.jsonl", "did you mean 'data.jsonl'?"),
    ("data.path=" + "x" * 300, "File name too long) (data.path); shorten the name"),
    ("data.path=", "data.path: "),
    ("data.path='a\\0b'", "error: "),
    ('data.path="a\\0b"', "error: "),
    ("data.path=/dev/null", "/dev/null: holds no examples"),
    ("data.path=nosuch://bucket/x.jsonl", "Protocol not known: nosuch"),
    ("data.path=http://127.0.0.1:9/x.jsonl", "check the network"),
    ("data.path=https://[/x.jsonl", "error: https://[/x.jsonl: "),
    ("data.path=memory://nothing/x.jsonl", "no such file (data.path)"),
    ("model.path=/nowhere", "/nowhere: no such model folder (model.path)"),
    ("model.path=nowhere", "nowhere: no such model folder (model.path)"),
    ("model.path=no/where", "no/where: neither a folder nor a model that the hub provides"),
    (
        "model.path=me/llama@v1",
        "me/llama@v1: neither a folder nor OWNER/NAME of a model on the hub (Repo id must use alphanumeric chars, '-', "
        "'_' or '.'. The name cannot start or end with '-' or '.' and the maximum length is 96) (model.path); for a "
        "revision, set model.path=me/llama and model.revision=v1",
    ),
    ("model.path=me/llama:v1", "; for a revision, set model.path=me/llama and model.revision=v1"),
    ("model.path=me/lla--ma", "on the hub (Cannot have -- or .. in repo_id) (model.path)"),
    ("model.path=me/llama.git", "on the hub (Repo_id cannot end by '.git') (model.path)"),
    ("model.path=me/.llama", "me/.llama: neither a folder nor OWNER/NAME of a model on the hub ("),
    ("model.path=me/lläma", "me/lläma: neither a folder nor OWNER/NAME of a model on the hub ("),
    ("model.path='me/llama '", "me/llama : neither a folder nor OWNER/NAME of a model on the hub ("),
    (f"model.path=me/{'a' * 97}", "a: neither a folder nor OWNER/NAME of a model on the hub ("),
    ("model.path=", "model.path: "),
    ("model.path=''", "model.path: expected a path or URL, got an empty text"),
    ("model.path=FOLDER/data.jsonl", "data.jsonl: is a file, expected a model folder"),
    ("model.path=FOLDER/empty", "empty: is empty, expected a model folder"),
    ("model.path=FOLDER/empty/../empty", "error: "),
    ("model.path=memory://nothing", "memory://nothing: no such model folder (model.path)"),
    ("model.path=~/nowhere-at-all", "nowhere-at-all: no such model folder (model.path)"),
    ("runtime.storage=/proc/x", "/proc/x: cannot be used (No such file or directory) (runtime.storage)"),
    ("runtime.storage=/dev/null", "/dev/null: "),
    ("runtime.storage=FOLDER/data.jsonl", "data.jsonl: is a file, expected a folder"),
    ("runtime.storage=FOLDER/data.jsonl/x", "Not a directory"),
    ("runtime.storage=FOLDER", "is not empty and holds no run"),
    ("runtime.storage=FOLDER/loop/x", "error: "),
    ("runtime.storage=" + "x" * 300, "File name too long"),
    ("runtime.storage=memory://x", "memory://x: ends with this process"),
    ("runtime.storage=nosuch://x", "Protocol not known: nosuch"),
    ("runtime.storage=s3://", "error: s3://"),
    ("runtime.storage=5", "runtime.storage: input should be a valid string"),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=[settings[:60] for settings, _ in SETTINGS])
def test_settings_are_rejected_with_one_line(
    rejected: Rejected, recipe: Path, settings: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = recipe.parent
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    _without_credentials(monkeypatch, folder)
    settings = settings.replace("FOLDER", str(folder)).replace("RECIPE", str(recipe))
    # Several settings are separated by a space; none of the values holds one before a section's name.
    parts = settings.split(" ") if settings.count("=") > 1 and " " in settings and "{" not in settings else [settings]
    assert words in rejected(*parts)


def test_a_path_of_windows_is_no_model_with_a_revision(rejected: Rejected) -> None:
    message = rejected("model.path=C:/llama")
    assert message.startswith("error: C:/llama: neither a folder nor OWNER/NAME of a model on the hub (")
    assert message.endswith(" (model.path)")


def test_every_setting_of_the_published_methods_has_a_wrong_value_here() -> None:
    methods = ("inference", "method.view", "method.rounds", "method.teacher_slot", "sampling.candidates")
    names = [name for name in dotted_names(Study) if name.startswith(methods) and name != "inference.search"]
    given = " ".join(settings for settings, _ in SETTINGS)
    assert [name for name in names if f"{name}=" not in given] == []


def test_a_hub_model_that_cannot_be_trained_is_rejected_with_one_line(
    rejected: Rejected, recipe: Path, tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its config, before its weights are downloaded; one that can be trained is accepted."""
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        config = {"model_type": "falcon", "num_hidden_layers": 2}
        hub.files["me/falcon"] = {"config.json": json.dumps(config).encode(), "model.safetensors": b"some weights"}
        line = rejected("model.path=me/falcon")
        assert line.startswith("error: me/falcon: a model of the family 'falcon' cannot be trained: its attention is ")
        assert hub.downloaded == ["config.json"]
        hub.files["me/llama"] = {path.name: path.read_bytes() for path in Path(tiny_model_path).iterdir()}
        assert command_line.main(["study", str(recipe), "model.path=me/llama", "--dry-run"]) == 0
        assert not [name for name in hub.downloaded if name.endswith(".safetensors")]


def _without_credentials(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """No access to any store: none of the user's files, and no request to a cloud's metadata service."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    S3FileSystem.clear_instance_cache()  # a file system keeps the credentials that it found


ENVIRONMENTS = [
    ({}, "data.path=s3://bucket/x.jsonl", "Unable to locate credentials) (data.path); check the credentials"),
    ({}, "model.path=s3://bucket/model", "Unable to locate credentials) (model.path); check the credentials"),
    ({}, "runtime.storage=s3://bucket/x", "Unable to locate credentials) (runtime.storage); check the credentials"),
    ({"AWS_PROFILE": "nope"}, "data.path=s3://bucket/x.jsonl", "set AWS_PROFILE to a profile of ~/.aws/config"),
    ({"AWS_PROFILE": "nope"}, "runtime.storage=s3://bucket/x", "set AWS_PROFILE to a profile of ~/.aws/config"),
    ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "data.path=s3://bucket/x.jsonl", "check the network and AWS_ENDPOINT"),
    ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "model.path=s3://bucket/x", "check the network and AWS_ENDPOINT"),
    ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "runtime.storage=s3://b/x", "check the network and AWS_ENDPOINT"),
    ({}, "data.path=http://127.0.0.1:9/x.jsonl", ") (data.path); check the network"),
    ({"AWS_ENDPOINT_URL": "no url"}, "runtime.storage=s3://bucket/x", "AWS_ENDPOINT_URL: expected http://HOST:PORT"),
    ({"RAY_ADDRESS": "127.0.0.1:1"}, "seed=0", "RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:1"),
    ({"RAY_ADDRESS": "ray://127.0.0.1:1"}, "seed=0", "RAY_ADDRESS: no Ray cluster answers at ray://127.0.0.1:1"),
    ({"RAY_ADDRESS": "http://foo bar"}, "seed=0", "RAY_ADDRESS: expected HOST:PORT, ray://HOST:PORT, auto or local"),
    ({"RAY_ADDRESS": "http://127.0.0.1:8265"}, "seed=0", "RAY_ADDRESS: expected HOST:PORT"),
    ({"RAY_ADDRESS": "auto-none"}, "seed=0", "RAY_ADDRESS: expected HOST:PORT"),
    ({"RAY_ADDRESS": "host:port"}, "seed=0", "RAY_ADDRESS: expected HOST:PORT"),
    ({"RAY_ADDRESS": "127.0.0.1:99999"}, "seed=0", "RAY_ADDRESS: expected HOST:PORT"),
    ({"RAY_ADDRESS": "nohost.invalid:6379"}, "seed=0", "RAY_ADDRESS: no Ray cluster answers at nohost.invalid:6379"),
    ({"RAY_ADDRESS": "." * 70 + ":1"}, "seed=0", "RAY_ADDRESS: no Ray cluster answers"),
]


@pytest.mark.parametrize(("environment", "setting", "words"), ENVIRONMENTS)
def test_environments_are_rejected_with_one_line(
    rejected: Rejected,
    recipe: Path,
    environment: dict[str, str],
    setting: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without_credentials(monkeypatch, recipe.parent)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "AWS_ENDPOINT_URL" in environment:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert words in rejected(setting)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that accepts connections and never answers, as one behind a firewall seems to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("runtime.storage=s3://bucket/x", "(runtime.storage)"),
        ("data.path=s3://bucket/x.jsonl", "(data.path)"),
        ("data.path=SERVER/x.jsonl", "(data.path)"),
        ("model.path=SERVER/x", "(model.path)"),
    ],
)
def test_a_silent_server_is_rejected_with_one_line(
    rejected: Rejected, silent_server: str, setting: str, named: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_credentials(monkeypatch, recipe.parent)
    monkeypatch.setattr("pos2distill.urls._ANSWER_SECONDS", 1.0)
    for name, value in (("ENDPOINT_URL", silent_server), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{name}", value)
    line = rejected(setting.replace("SERVER", silent_server))
    assert named in line
    assert "timed out" in line


BOMB = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
RECIPES: list[tuple[bytes, str]] = [
    (b"", "expected sections (model, data, "),
    (b"- 1", "expected sections (model, data, …), got a list"),
    (b"text", "got a single value"),
    (b"{", "not valid YAML"),
    (b"a: b: c", "not valid YAML"),
    (b"\tname: x", "not valid YAML"),
    (b"\xff\xfe\x00", "not valid YAML"),
    (b"\x00", "not valid YAML"),
    (b"name: \x80", "not valid YAML"),
    ("name: x".encode("utf-16"), "not valid YAML"),
    (b"name: !!python/object/apply:os.system [ls]", "not valid YAML"),
    (b"name: 2020-02-32", "not valid YAML"),
    (b"[" * 3000, "line 1: more than 100 nested levels"),
    (b"a: " * 100, "not valid YAML"),
    (b"training: {epochs: 1}\ntraining: {epochs: 2}", "line 2: the key 'training' appears twice; remove one"),
    (b"training: {epochs: 1, epochs: 7}", "line 1: the key 'epochs' appears twice; remove one"),
    (b"name: x\n1: 2", "error: "),
    (b"null: 2", "error: "),
    (b"[1]: 2", "error: "),
    (b"{}: 2", "error: "),
    (b"? {a: b}\n: 2", "error: "),
    (b"name: x\ndescription: y", "error: "),
    (b"model: [1]", "error: "),
    (b"sweep: 3", "error: "),
    (b"runtime: 3", "error: "),
    (BOMB.encode() + b"\ndescription: *a11", "error: "),
    (b"\x89PNG\r\n\x1a\n", "not valid YAML"),
]


@pytest.mark.parametrize(("content", "words"), RECIPES, ids=[repr(content[:40]) for content, _ in RECIPES])
def test_recipes_are_rejected_with_one_line(rejected: Rejected, recipe: Path, content: bytes, words: str) -> None:
    recipe.write_bytes(content)
    line = rejected()
    assert line.startswith(f"error: {recipe}: ")
    assert words in line


def test_a_value_of_billions_of_parts_is_rejected_at_once(rejected: Rejected, recipe: Path) -> None:
    raw = yaml.safe_load(recipe.read_text())
    del raw["description"]
    nested = "\n".join(f"    {line}" for line in BOMB.splitlines())
    recipe.write_text(f"{yaml.safe_dump(raw)}description:\n{nested}\n")
    assert "aliases stand for more than 1,000,000 values; write them out" in rejected()


PATHS = [
    ("FOLDER", "is a folder, expected a recipe"),
    ("FOLDER/folder.yaml", "is a folder, expected a recipe"),
    ("FOLDER/broken.yaml", "is a broken symbolic link to"),
    ("FOLDER/loop.yaml", "error: "),
    ("FOLDER/nothing.yaml", "no such file; did you mean"),
    ("FOLDER/data.jsonl", "expected a recipe, a file named *.yaml; data goes to data.path"),
    ("quickstrat", "no such recipe; did you mean 'quickstart'?"),
    ("x" * 4000, "no such recipe"),
    ("x" * 300 + ".yaml", "no such file"),
    ("data.documents=3", "data.documents=3: expected a recipe first, then settings"),
    ("", "is a folder, expected a recipe"),
    ("~/nowhere-at-all.yaml", "no such file"),
    ("/proc/self/mem/x.yaml", "no such file"),
]


@pytest.mark.parametrize(("path", "words"), PATHS)
def test_paths_of_recipes_are_rejected_with_one_line(rejected: Rejected, recipe: Path, path: str, words: str) -> None:
    folder = recipe.parent
    (folder / "folder.yaml").mkdir()
    (folder / "broken.yaml").symlink_to(folder / "gone")
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    assert words in rejected(path=path.replace("FOLDER", str(folder)))


@pytest.mark.parametrize(
    ("closed", "mode", "setting", "words"),
    [
        ("recipe.yaml", 0, "seed=0", "recipe.yaml: cannot be read (Permission denied)"),
        (
            "data.jsonl",
            0,
            "seed=0",
            "cannot be used (Permission denied) (data.path); check the permissions of the file",
        ),
        (
            "model",
            0,
            "model.path=FOLDER/model",
            "cannot be used (Permission denied) (model.path); check the permissions",
        ),
        ("model", 0, "model.path=FOLDER/model/in", "FOLDER/model/in"),
        (
            "model/config.json",
            0,
            "model.path=FOLDER/model",
            "FOLDER/model: cannot be used (Permission denied: FOLDER/model/config.json) (model.path); check",
        ),
        (
            "model/chat_template.jinja",
            0,
            "model.path=FOLDER/model",
            "FOLDER/model: cannot be used (Permission denied: FOLDER/model/chat_template.jinja) (model.path); check",
        ),
        ("model/model.safetensors", 0, "model.path=FOLDER/model", "Permission denied"),
        ("read-only", 0o500, "runtime.storage=FOLDER/read-only", "cannot be used (Permission denied"),
        ("read-only", 0o500, "runtime.storage=FOLDER/read-only/runs", "cannot be used (Permission denied"),
        ("closed", 0, "runtime.storage=FOLDER/closed", "cannot be used (Permission denied"),
    ],
)
def test_what_may_not_be_used_is_rejected_with_one_line(
    rejected: Rejected, recipe: Path, closed: str, mode: int, setting: str, words: str
) -> None:
    folder = recipe.parent
    shutil.copytree(yaml.safe_load(recipe.read_text())["model"]["path"], folder / "model")
    path = folder / closed
    if not path.exists():
        path.mkdir()
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        with respecting_modes():
            line = rejected(setting.replace("FOLDER", str(folder)))
    finally:
        path.chmod(before)
    assert words.replace("FOLDER", str(folder)) in line


@pytest.mark.parametrize("setting", ["data.path=gs://b/x.jsonl", "model.path=gs://b/x", "runtime.storage=gs://b/x"])
def test_google_storage_without_a_network_is_rejected_at_once(
    rejected: Rejected, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no name is resolved; gcsfs itself tries for a minute."""

    def resolve(*_: object, **__: object) -> None:
        raise urllib.error.URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))

    for name in ("STORAGE_EMULATOR_HOST", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pos2distill.urls.urllib.request.urlopen", resolve)
    line = rejected(setting)
    assert "cannot be used (Temporary failure in name resolution)" in line
    assert line.endswith("; check the network")


def test_a_sweep_of_too_many_studies_is_rejected_at_once(rejected: Rejected) -> None:
    rates = [number / 1e6 for number in range(1, 301)]
    start = time.monotonic()
    line = rejected(f"sweep.training.learning_rate={rates}", f"sweep.seed={list(range(300))}")
    assert line == "error: sweep: 90000 studies; at most 1000 are possible"
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("action", ["validate", "render"])
@pytest.mark.parametrize("name", ["x" * 3000, "x" * 3000 + ".yaml", "x/" * 1500], ids=["a name", "a file", "folders"])
def test_names_of_cluster_specs_that_are_too_long_are_rejected_with_one_line(
    name: str, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["cluster", action, name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: x")
    assert "no such " in line
    assert len(line) < 1000


def _zip(data: bytes, *names: str) -> bytes:
    """A zip archive with the data under these names (of folders, nothing); default: `data.jsonl`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names or ("data.jsonl",):
            archive.writestr(name, b"" if name.endswith("/") else data)
    return file.getvalue()


def _changed_zip(data: bytes, field: int, value: int) -> bytes:
    """An archive with another byte in the header of its file; it is repeated in the archive's list, two bytes later."""
    changed = bytearray(_zip(data))
    changed[field] = value
    changed[changed.find(b"PK\1\2") + field + 2] = value
    return bytes(changed)


GOLD = {"text": "x", "gold": True}
OTHERS = [{"text": text, "gold": False} for text in "yzw"]
LINE = json.dumps({"question": "?", "answers": ["x"], "documents": [GOLD, *OTHERS]}).encode() + b"\n"


def _with(**fields: Any) -> bytes:
    return json.dumps({**json.loads(LINE), **fields}).encode() + b"\n"


DATA: list[tuple[str, bytes, str]] = [
    # Files of another kind.
    ("x.jsonl", b"", "holds no examples"),
    ("x.jsonl", b"\n\n  \n", "holds no examples"),
    ("x.jsonl", gzip.compress(LINE), "is gzip data, but its name does not end in .gz"),
    ("x.jsonl", bz2.compress(LINE), "is bzip2 data"),
    ("x.jsonl", lzma.compress(LINE), "is xz data"),
    ("x.jsonl", b"\x28\xb5\x2f\xfd rest", "is Zstandard data"),
    ("x.jsonl", _zip(LINE), "is a zip archive"),
    ("x.XLSX", _zip(LINE), "is a spreadsheet; write its records as JSON Lines or Parquet"),
    ("x.jsonl", b"PAR1....PAR1", "cannot be opened ("),
    ("x.parquet", bytes(range(200, 250)), "is not a Parquet file despite its name; copy it again, or rename it"),
    ("x.jsonl", b"ARROW1\0\0", "is an Arrow file"),
    ("x.jsonl", LINE.decode().encode("utf-16"), "is UTF-16; save it as UTF-8"),
    ("x.jsonl", LINE.decode().encode("utf-16-le"), "is UTF-16; save it as UTF-8"),
    ("x.jsonl", LINE.decode().encode("utf-16-be"), "is UTF-16; save it as UTF-8"),
    ("x.jsonl", LINE.decode().encode("utf-32"), "is UTF-32; save it as UTF-8"),
    ("x.jsonl", LINE.decode().encode("utf-32-le"), "is UTF-32; save it as UTF-8"),
    ("x.jsonl", b"\0asm\1\0\0\0", "line 1: not valid JSON"),
    ("x.parquet.gz", gzip.compress(b"PAR1....PAR1"), "is a Parquet file in a compressed one; decompress it"),
    ("x.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "is a git-lfs pointer"),
    ("x.jsonl", b"<!DOCTYPE html><html>", "is a web page"),
    ("x.jsonl", b"%PDF-1.7", "is a PDF file"),
    ("x.csv", b"question,answer\nwho,me\n", "line 1: not valid JSON"),
    ("x.csv", b"question,answer\nwho,me\n", "; if it is a CSV file, write its records as JSON Lines"),
    ("x.jsonl", b"{'question': 'who', 'answers': ['me']}", "JSON has double quotes, not single ones"),
    ("x.jsonl", b'{"question": "who", "answers": ["me",]}', "remove the comma before the closing bracket"),
    ("x.jsonl.gz", LINE, "is not a gzip file despite its name"),
    ("x.jsonl.gz", gzip.compress(LINE * 100)[:-20], "broken gzip"),
    ("x.jsonl.gz", gzip.compress(LINE)[:5], "broken gzip"),
    ("x.jsonl.gz", gzip.compress(gzip.compress(LINE)), "is compressed twice; decompress it once"),
    ("x.jsonl.xz", lzma.compress(bz2.compress(LINE)), "is compressed twice; decompress it once"),
    ("x.jsonl.bz2", LINE, "is not a complete bz2 file"),
    ("x.jsonl.bz2", bz2.compress(LINE * 100)[:-20], "broken bz2 "),
    ("x.jsonl.xz", LINE, "is not a complete xz file"),
    ("x.jsonl.xz", lzma.compress(LINE * 100)[:-20], "broken xz after line 100"),
    ("x.jsonl.zip", LINE, "is not a zip file despite its name"),
    ("x.jsonl.gz", gzip.compress(LINE)[:-8] + bytes(8), "broken gzip (CRC check failed"),
    ("x.jsonl.gz", gzip.compress(LINE) + b"more", "broken gzip (other bytes follow its end); fetch the file again"),
    ("x.jsonl.zip", _zip(LINE)[:-20], "broken zip (File is not a zip file); fetch the file again"),
    ("x.jsonl.zip", _zip(LINE).replace(b'"x"', b'"y"'), "broken zip (Bad CRC-32"),
    ("x.jsonl.zip", _zip(LINE, "folder/"), "expected a zip archive of one file, found none; extract"),
    ("x.jsonl.zip", _zip(LINE, "a", "b"), "expected a zip archive of one file, found 2: a, b; extract"),
    ("x.jsonl.zip", _changed_zip(LINE, 6, 1), "data.jsonl in it is encrypted; extract it"),
    ("x.jsonl.zip", _changed_zip(LINE, 8, 99), "cannot be opened (That compression method is not supported); extract"),
    # Lines and records.
    ("x.jsonl", b"{", "line 1: not valid JSON"),
    ("x.jsonl", LINE + LINE[:40], "line 2: not valid JSON"),
    ("x.jsonl", LINE + b"\xff\n", "line 2: not UTF-8 (invalid start byte at byte 0); save the file as UTF-8"),
    ("x.jsonl", LINE + b"\xef\xbb\xbf" + LINE, "line 2: a byte-order mark at column 1; remove it"),
    ("x.jsonl", b"1\n", "line 1: expected a JSON object, got int"),
    ("x.jsonl", b"null\n", "line 1: expected a JSON object"),
    ("x.jsonl", b'{"a": ' * 5000, "line 1: nested too deeply"),
    ("x.jsonl", b'{"a": ' * 100_000, "line 1: nested too deeply"),
    ("x.json", b"[" * 50_000, "record 1: nested too deeply"),
    ("x.json", b"[" * 200_000, "record 1: nested too deeply"),
    ("x.json", b'[{"a":' + b"[" * 200_000, "nested too deeply"),
    ("x.json", b"[", "record 1: not valid JSON"),
    ("x.json", b"[]", "holds no examples"),
    ("x.json", b"[1]", "record 1: expected a JSON object"),
    ("x.json", b"[" + LINE + b",", "record 2: not valid JSON"),
    ("x.json", b"[" + LINE + b"] trailing", "not valid JSON"),
    ("x.jsonl", b'{"question": ' + b"9" * 6000 + b"}", "line 1: holds a number with too many digits"),
    ("x.jsonl", b'{"question": "\\ud83d"}', "unpaired surrogate"),
    ("x.jsonl", b'{"question": "a", "question": "b"}', "line 1, question: given twice"),
    ("x.jsonl", b"{}", "fields question, answers, documents are missing"),
    ("x.jsonl", b'{"question": NaN}', "fields answers, documents are missing"),
    # Fields.
    ("x.jsonl", _with(question=""), "question: empty"),
    ("x.jsonl", _with(question=" \t"), "question: empty"),
    ("x.jsonl", _with(question=5), "question: "),
    ("x.jsonl", _with(question=None), "question: "),
    ("x.jsonl", _with(answers=[]), "answers: empty"),
    ("x.jsonl", _with(answers="a"), "answers: "),
    ("x.jsonl", _with(answers=[""]), "answers: one is blank"),
    ("x.jsonl", _with(answers=[1]), "answers"),
    ("x.jsonl", _with(answers=["the"]), "all empty once normalized"),
    ("x.jsonl", _with(answers=["zebra"]), "the gold document contains none of the answers"),
    ("x.jsonl", _with(documents=[]), "no gold document"),
    ("x.jsonl", _with(documents={}), "documents: "),
    ("x.jsonl", _with(documents=[1]), "documents[0]"),
    ("x.jsonl", _with(documents=[{"text": "x"}]), "gold"),
    ("x.jsonl", _with(documents=[{"text": "a", "gold": "yes"}]), "gold"),
    ("x.jsonl", _with(documents=[GOLD, GOLD]), "2 gold documents; expected exactly one"),
    ("x.jsonl", _with(documents=[{"text": None, "gold": True}]), "text"),
    ("x.jsonl", _with(id=5), "id: "),
    ("x.jsonl", _with(documents=[GOLD, *OTHERS[:2]]), "documents: found 3, but prompts of 4 slots are asked for"),
]


@pytest.mark.parametrize(
    ("name", "content", "words"), DATA, ids=[f"{row} {case[0]}: {case[2][:30]}" for row, case in enumerate(DATA)]
)
def test_data_files_are_rejected_with_one_line(
    rejected: Rejected, recipe: Path, name: str, content: bytes, words: str
) -> None:
    path = recipe.parent / name
    path.write_bytes(content)
    line = rejected(f"data.path={path}")
    assert line.startswith((f"error: {path}: ", f"error: {path}, "))
    assert words in line


def test_duplicates_are_mentioned_when_examples_are_too_few(rejected: Rejected, recipe: Path) -> None:
    data = write_examples(recipe.parent / "one.jsonl", 1, 6)
    rows = [json.loads(data.read_text()) | {"id": str(number)} for number in range(60)]
    rows = [{**row, "id": "one"} for row in rows]
    data.write_text("\n".join(map(json.dumps, rows)))
    assert "records skipped: 59 duplicate" in rejected(f"data.path={data}")


# Model folders.


def _json(name: str, **fields: Any) -> Callable[[Path], None]:
    """Change fields of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        raw = json.loads((folder / name).read_text()) | fields
        raw = {field: value for field, value in raw.items() if value is not None}
        (folder / name).write_text(json.dumps(raw))

    return change


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None  # type: ignore[return-value]


def _remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def _tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = dict(load_file(folder / "model.safetensors"))
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def _cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def _link(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "gone")

    return change


def _folder(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


NORM = "model.norm.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n"
INDEX = {"weight_map": {NORM: "model-00001-of-00002.safetensors"}}


def _sharded(index: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def _to_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (_remove("model.safetensors"), "holds no weights in safetensors format"),
    "weights of git-lfs": (_write("model.safetensors", LFS), "run `git lfs pull` in the model folder"),
    "weights of nothing": (_write("model.safetensors", b""), "is not a safetensors file of 0 bytes"),
    "weights of 3 bytes": (_write("model.safetensors", b"abc"), "is not a safetensors file"),
    "weights of text": (_write("model.safetensors", b"hello world, hello"), "is not a safetensors file"),
    "weights of zeros": (_write("model.safetensors", bytes(1000)), "is not a safetensors file"),
    "weights with a pickle": (_write("model.safetensors", b"\x80\x04\x95" * 50), "is not a safetensors file"),
    "weights with a web page": (_write("model.safetensors", b"<!DOCTYPE html>" * 20), "is not a safetensors file"),
    "weights cut in the header": (_cut("model.safetensors", 200), "copy or download it again"),
    "weights cut at the end": (_cut("model.safetensors", 20_000), "copy or download it again"),
    "weights are a broken link": (_link("model.safetensors"), "error: "),
    "weights are a folder": (_folder("model.safetensors"), "error: "),
    "tensor missing": (_tensors(lambda t: t.pop(NORM)), f"tensor {NORM} of shape [32] is missing"),
    "layer missing": (
        _tensors(lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name]),
        "is missing",
    ),
    "tensor of another shape": (_tensors(_set(NORM, lambda t: t[:16].copy())), "has shape [16], config.json describes"),
    "tensor of integers": (_tensors(_set(NORM, lambda t: t.astype("int64"))), "is stored as I64"),
    "tensor with NaN": (_tensors(_set(NORM, lambda t: t * np.float32("nan"))), f"tensor {NORM} holds NaN"),
    "tensor with infinity": (_tensors(_set(NORM, lambda t: t + np.float32("inf"))), "holds infinite values"),
    "no tensor at all": (_tensors(lambda t: t.clear()), "is missing"),
    "index names absent shards": (_sharded(INDEX), "names model-00001-of-00002.safetensors, which is not in"),
    "index is a list": (_sharded([]), "expected JSON with a weight_map"),
    "index of nothing": (_sharded({"weight_map": {}}), "error: "),
    "index names numbers": (_sharded({"weight_map": {"a": 5}}), "error: "),
    "index names another folder": (_sharded({"weight_map": {"a": "../x.safetensors"}}), "error: "),
    "no config": (_remove("config.json"), "holds no config.json"),
    "config of text": (_write("config.json", b"hello"), "no usable config.json"),
    "config of a list": (_write("config.json", b"[]"), "no usable config.json"),
    "config of nothing": (_write("config.json", b""), "no usable config.json"),
    "config of bytes": (_write("config.json", b"\xff\xfe\x00"), "no usable config.json"),
    "config cut": (_cut("config.json", 50), "no usable config.json"),
    "config is a folder": (_folder("config.json"), "no usable config.json"),
    "config is a broken link": (_link("config.json"), "config.json) (model.path)"),
    "config of an unknown model": (_json("config.json", model_type="nothing"), "no usable config.json"),
    "config of no model": (_json("config.json", model_type=None, architectures=None), "no usable config.json"),
    "config of bert": (_json("config.json", model_type="bert"), "weights and config.json are of different models"),
    "config of a vision model": (_json("config.json", model_type="vit"), "error: "),
    "config with more layers": (_json("config.json", num_hidden_layers=6), "is missing (36 tensors of 57)"),
    "config with another width": (_json("config.json", hidden_size=64), "config.json describes"),
    "config with another vocabulary": (_json("config.json", vocab_size=256), "has shape [300, 32]"),
    "config with width of text": (
        _json("config.json", hidden_size="wide"),
        "Validation error for field 'hidden_size': TypeError",
    ),
    "config with width 0": (_json("config.json", hidden_size=0), "error: "),
    "config with negative layers": (_json("config.json", num_hidden_layers=-1), "error: "),
    "config with no heads": (_json("config.json", num_attention_heads=0), "error: "),
    "config with odd heads": (_json("config.json", num_attention_heads=5, num_key_value_heads=5), "error: "),
    "config with an unknown activation": (_json("config.json", hidden_act="nothing"), "error: "),
    "config without positions": (_json("config.json", max_position_embeddings=0), "set model.max_length"),
    "config with positions of text": (_json("config.json", max_position_embeddings="many"), "error: "),
    "config with a short context": (
        _json("config.json", max_position_embeddings=200),
        "exceed the model's context of 200",
    ),
    "config with an unknown rope": (_json("config.json", rope_parameters={"rope_type": "nothing"}), "error: "),
    "config with rope of text": (_json("config.json", rope_parameters="yes"), "error: "),
    "no tokenizer": (_remove("tokenizer.json"), "holds no tokenizer"),
    "tokenizer of text": (_write("tokenizer.json", b"hello"), "no usable tokenizer"),
    "tokenizer of nothing": (_write("tokenizer.json", b""), "no usable tokenizer"),
    "tokenizer of a list": (_write("tokenizer.json", b"[]"), "no usable tokenizer"),
    "tokenizer of git-lfs": (_write("tokenizer.json", LFS), "no usable tokenizer"),
    "tokenizer cut": (_cut("tokenizer.json", 300), "no usable tokenizer"),
    "tokenizer without a model": (_json("tokenizer.json", model=None), "no usable tokenizer"),
    "tokenizer config of text": (_write("tokenizer_config.json", b"hello"), "no usable tokenizer"),
    "tokenizer config of a list": (_write("tokenizer_config.json", b"[]"), "no usable tokenizer"),
    "no template": (_remove("chat_template.jinja"), "has no chat template"),
    "template of nothing": (_write("chat_template.jinja", b""), "chat template"),
    "template that is not closed": (_write("chat_template.jinja", b"{% for m in messages %}"), "chat template"),
    "template with an unknown filter": (_write("chat_template.jinja", b"{{ messages|nothing }}"), "chat template"),
    "template that raises": (
        _write("chat_template.jinja", b"{{ raise_exception('no') }}"),
        "chat template cannot be used",
    ),
    "template without messages": (_write("chat_template.jinja", b"hello"), "leaves out a message"),
    "template that divides by zero": (_write("chat_template.jinja", b"{{ 1 / 0 }}"), "chat template"),
    "template that is not UTF-8": (_write("chat_template.jinja", b"\xff\xfe{{ messages }}"), "error: "),
    "template that adds a number": (
        _write("chat_template.jinja", b"{{ messages + 1 }}"),
        "chat template cannot be used",
    ),
    "template that reaches for Python": (
        _write("chat_template.jinja", b"{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        "chat template cannot be used",
    ),
    "generation config of text": (_write("generation_config.json", b"hello"), "generation_config.json: expected"),
    "generation config with an end of text": (
        _write("generation_config.json", b'{"eos_token_id": "x"}'),
        "generation_config.json: expected as eos_token_id a whole number from 0 to 299, or a list of them, got 'x'",
    ),
    "generation config with an end beyond the vocabulary": (
        _write("generation_config.json", b'{"eos_token_id": [4, 300]}'),
        "or a list of them, got [4, 300]; correct it",
    ),
    "generation config with an end of true": (
        _write("generation_config.json", b'{"eos_token_id": true}'),
        "or a list of them, got True; correct it",
    ),
    "config with padding beyond the vocabulary": (
        _json("config.json", pad_token_id=5000),
        "config.json: pad_token_id 5000 is none of the 300 tokens; correct it",
    ),
    "an adapter": (_to_adapter, "is an adapter (adapter_config.json); merge it into its base model"),
    "generation config of a list": (_write("generation_config.json", b"[]"), "generation_config.json: expected"),
}


@pytest.mark.parametrize("case", MODELS)
def test_model_folders_are_rejected_with_one_line(rejected: Rejected, recipe: Path, case: str) -> None:
    change, words = MODELS[case]
    folder = Path(shutil.copytree(yaml.safe_load(recipe.read_text())["model"]["path"], recipe.parent / "model"))
    change(folder)
    line = rejected(f"model.path={folder}")
    assert line.startswith((f"error: {folder}", "error: example "))
    assert words in line
