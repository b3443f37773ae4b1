"""What the checks before a run accept, warn of and reject. Wrong input of all kinds is in `test_wrong_input`."""

import json
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pipelines.checks import data_checks, machine_checks, preflight
from pipelines.checks.model_checks import count_parameters
from pipelines.checks.pending_run import PendingRun
from pipelines.dry_run import describe
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.errors import UserError, warn_once
from pos2distill.store.storage import claim_storage
from pos2distill.tasks.datasets import load_split
from scripts.model_families import save_tiny
from tests.support.commands import run_study
from tests.support.tiny import CHAT_TEMPLATE

Make = Callable[..., Recipe]


def run(recipe: Recipe) -> None:
    plan = make_plan(recipe)
    preflight.preflight(recipe, plan, plan.stages)


def test_preflight_leaves_nothing(make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    recipe = make_recipe(runtime={"storage": str(tmp_path / "new" / "storage")})
    run(recipe)
    assert not (tmp_path / "new").exists()
    assert list(temporary.iterdir()) == []


def test_preflight_checks_a_model_again_whose_files_changed(
    make_recipe: Make, tiny_model_path: str, tmp_path: Path
) -> None:
    """In a notebook, the process is the same."""
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    recipe = make_recipe(model={"path": str(folder)})
    run(recipe)
    template, weights = folder / "chat_template.jinja", folder / "model.safetensors"
    whole = template.read_text()
    template.write_text("{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="chat template"):
        run(recipe)
    template.write_text(whole)
    run(recipe)
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        run(recipe)


@pytest.mark.parametrize(
    ("strategy", "precision", "is_checked"),
    [("zero3", "bfloat16", True), ("zero3", "float32", False), ("torch", "bfloat16", False)],
)
def test_check_model_checks_what_zero3_would_round(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, strategy: str, precision: str, is_checked: bool
) -> None:
    checked: list[str] = []
    monkeypatch.setattr("pos2distill.models.check.check_sharded", lambda model: checked.append(model.path))
    recipe = make_recipe(
        model={"dtype": "bfloat16"},
        training={"precision": precision},
        runtime={"trainers": {"strategy": strategy}},
    )
    run(recipe)
    assert checked == [recipe.study.model.path] * is_checked


def test_check_model_rejects_kernels_that_leave_out_soft_caps_where_the_engine_answers(
    make_recipe: Make, tmp_path: Path
) -> None:
    """Training has a check of its own, and other kernels on GPUs."""
    folder = save_tiny("gemma2", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(make_recipe().study.model.path, name), folder.path)
    recipe = make_recipe(model={"path": folder.path, "engine": "hf", "max_length": 128})
    plan = make_plan(recipe)
    with pytest.raises(UserError, match="its attention scores are soft-capped"):
        preflight.check_model(PendingRun(recipe, plan, [plan.evaluate_base]))
    preflight.check_model(PendingRun(recipe, plan, [plan.prepare]))


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?"])
def test_preflight_rejects_names_of_folders_that_vllm_takes_for_patterns(
    make_recipe: Make, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    ending = f"vLLM loads no model from {folder}, since it takes [, * and ? for a pattern; rename the folder, or set "
    with pytest.raises(UserError, match=f"^runtime.storage: {re.escape(ending)}model.engine to hf$"):
        run(make_recipe(model={"engine": "vllm"}, runtime={"storage": str(folder)}))
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"^model.path: {re.escape(ending)}model.engine to hf$"):
        run(make_recipe(model={"engine": "vllm", "path": str(folder)}))


def test_preflight_rejects_two_copies_of_the_weights_for_vllm(
    make_recipe: Make, tiny_model_path: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "mistral")
    (folder / "consolidated.safetensors").write_bytes(b"old")
    message = f"{folder}: holds consolidated.safetensors and no model.safetensors.index.json, so vLLM would read both"
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        run(make_recipe(model={"engine": "vllm", "path": str(folder)}))


def test_preflight_rejects_arguments_that_vllm_does_not_have(make_recipe: Make) -> None:
    arguments = {"kv_cache_dtpye": "fp8"}
    message = "model.engine_args: kv_cache_dtpye: vLLM has no such argument; did you mean 'kv_cache_dtype'?"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        run(make_recipe(model={"engine": "vllm", "engine_args": arguments}))


@pytest.mark.parametrize("inside", ["", "/runs/new"])
def test_preflight_rejects_a_storage_in_the_models_folder(
    make_recipe: Make, tiny_model_path: str, tmp_path: Path, inside: str
) -> None:
    """Its files are hashed as the model's, so that no later run would find what this one stored."""
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    if not inside:
        (folder / "run.json").write_text('{"name": "tiny"}')
    recipe = make_recipe(model={"path": str(folder)}, runtime={"storage": f"{folder}{inside}"})
    with pytest.raises(UserError) as caught:
        run(recipe)
    assert str(caught.value) == (
        f"runtime.storage: {folder}{inside}: is inside the model's folder {folder}, so that what a run writes would "
        f"make it another model; choose a folder elsewhere"
    )
    run(make_recipe(model={"path": str(folder)}, runtime={"storage": f"{folder}-runs"}))


@pytest.mark.parametrize("storage", ["link/runs", "elsewhere/../model/runs"])
def test_preflight_rejects_a_storage_that_leads_into_the_models_folder(
    make_recipe: Make, tiny_model_path: str, tmp_path: Path, storage: str
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    (tmp_path / "link").symlink_to(folder)
    recipe = make_recipe(model={"path": str(folder)}, runtime={"storage": str(tmp_path / storage)})
    with pytest.raises(UserError, match="is inside the model's folder"):
        run(recipe)
    assert not (folder / "runs").exists()


@contextmanager
def grpc_server(**answers: Callable[..., bytes]) -> Iterator[str]:
    """A server with these calls of the service that Ray 2.60 asks first. Yields its address."""
    server = grpc.server(ThreadPoolExecutor(1))
    calls = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in answers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def refuse_token(request: bytes, context: grpc.ServicerContext) -> bytes:
    return context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")


@pytest.mark.parametrize("answer", [lambda request, context: b"", refuse_token])
@pytest.mark.parametrize("address", ["", "auto", "local", "ADDRESS", "ray://ADDRESS"])
def test_check_ray_accepts_what_answers(
    make_recipe: Make, address: str, answer: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with grpc_server(GetClusterId=answer) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", address.replace("ADDRESS", cluster))
        run(make_recipe())


NOT_RAY = r"^RAY_ADDRESS: no Ray cluster answers at .+ \(what listens there does not answer as Ray does\); start it"


def test_check_ray_rejects_another_service(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_server() as service:
        monkeypatch.setenv("RAY_ADDRESS", f"ray://{service}")  # Ray Client's server has other calls
        run(make_recipe())
        monkeypatch.setenv("RAY_ADDRESS", service)
        with pytest.raises(UserError, match=NOT_RAY):
            run(make_recipe())


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_check_ray_rejects_a_mute_server(make_recipe: Make, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and says nothing, so that Ray would wait for it."""
    monkeypatch.setattr(machine_checks, "_CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        start = time.monotonic()
        with pytest.raises(UserError, match=NOT_RAY):
            run(make_recipe())
        assert time.monotonic() - start < 10
        monkeypatch.setenv("RAY_USE_TLS", "1")
        run(make_recipe())  # only Ray can ask


def test_check_ray_gives_up_after_its_time(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts no connection, as behind a firewall that drops packets."""
    monkeypatch.setattr(machine_checks, "_CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:  # they fill the queue of connections
            client.setblocking(False)
            client.connect_ex(address)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{address[1]}")
        start = time.monotonic()
        with pytest.raises(UserError, match=r"^RAY_ADDRESS: no Ray cluster answers at .+ \(timed out\)"):
            run(make_recipe())
        assert time.monotonic() - start < 10
        for client in waiting:
            client.close()


def test_check_ray_is_of_the_ray_executor_alone(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    run(make_recipe(runtime={"executor": "local"}))


def _with_free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))


# The tiny model has 37,792 parameters: 151,168 bytes as float32, and 12 bytes of each in a training state.
_MODEL_BYTES = 151_168
_STATE_BYTES = 453_504


def test_check_space_counts_parameters(make_recipe: Make) -> None:
    parameters = count_parameters(make_recipe().study.model)
    assert 4 * parameters == _MODEL_BYTES
    assert 12 * parameters == _STATE_BYTES


@pytest.mark.parametrize(
    ("free", "outcome"),
    [
        (_MODEL_BYTES - 1, "rejected"),
        (_MODEL_BYTES, "warned"),
        (_MODEL_BYTES + 3 * _STATE_BYTES - 1, "warned"),
        (_MODEL_BYTES + 3 * _STATE_BYTES, "accepted"),
    ],
)
def test_check_space(
    make_recipe: Make, free: int, outcome: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_free_space(monkeypatch, free)
    if outcome == "rejected":
        with pytest.raises(UserError, match=r"GiB are free, the distilled model takes .+; free space there"):
            run(make_recipe())
        return
    run(make_recipe())
    assert ("training states take up to" in capsys.readouterr().err) == (outcome == "warned")


def test_check_space_of_adapters_counts_the_model_alone(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_free_space(monkeypatch, _MODEL_BYTES)
    run(make_recipe(training={"lora": {"rank": 2}}))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("address", "warns"), [("", True), ("ADDRESS", False)])
def test_check_temporary_space(
    make_recipe: Make,
    address: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a cluster, the disks of the machines that train are not those of this one."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    recipe = make_recipe()
    plan = make_plan(recipe)
    task = PendingRun(recipe, plan, plan.stages)
    _with_free_space(monkeypatch, _STATE_BYTES)
    machine_checks.check_temporary_space(task)
    assert capsys.readouterr().err == ""
    _with_free_space(monkeypatch, _STATE_BYTES - 1)
    machine_checks.check_temporary_space(task)
    error = capsys.readouterr().err
    assert bool(error) == warns
    if warns:
        assert error.startswith(f"warning: {tempfile.gettempdir()}: ")
        assert error.endswith("is written there first; set TMPDIR to a folder on a larger disk\n")


STAGED = "add runtime.mode=staged"
LOWER = "lower the actors, workers or cpus under runtime"


@pytest.mark.parametrize(
    ("address", "engine", "runtime", "needed", "remedy"),
    [
        ("", "hf", {"samplers": {"cpus": 4}, "mode": "staged"}, None, ""),
        ("", "hf", {"samplers": {"cpus": 3.5}}, None, ""),  # 1 each for the teacher and the trainer, .5 for a task
        ("", "hf", {"samplers": {"cpus": 4}}, "6.5", STAGED),
        ("", "hf", {"samplers": {"cpus": 7}, "mode": "staged"}, "8.5", LOWER),
        ("", "hf", {"trainers": {"workers": 6}, "mode": "staged"}, None, ""),
        ("", "hf", {"trainers": {"workers": 7}, "mode": "staged"}, "7", LOWER),
        ("", "fake", {"samplers": {"min": 8, "max": 8}, "mode": "staged"}, "9.5", LOWER),
        ("ADDRESS", "hf", {"samplers": {"cpus": 7}}, None, ""),
        ("", "hf", {"samplers": {"cpus": 7}, "executor": "local"}, None, ""),
    ],
)
def test_check_cpus_warns_of_more_than_ray_has_here(
    make_recipe: Make,
    address: str,
    engine: str,
    runtime: dict[str, Any],
    needed: str | None,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("pos2distill.hardware.available_cpus", lambda: 2)
    recipe = make_recipe(model={"engine": engine}, runtime=runtime)
    plan = make_plan(recipe)
    machine_checks.check_cpus(PendingRun(recipe, plan, plan.stages))
    line = (
        f"warning: this run needs {needed} CPUs at the same time, Ray is started with 6 on this machine; run on a "
        f"cluster (RAY_ADDRESS), or {remedy}\n"
    )
    assert capsys.readouterr().err == ("" if needed is None else line)


def test_preflight_warns_of_a_context_beyond_the_models(make_recipe: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run(make_recipe(model={"max_length": 513}))
    assert "warning: model.max_length: 513, but" in capsys.readouterr().err


def test_the_longest_example_of_all_is_tokenized(make_recipe: Make) -> None:
    """One long document among 40 records, in the last of 12 evaluation examples."""
    recipe = make_recipe(data={"eval_examples": 12})
    data = recipe.study.data
    last = load_split(data, documents=4, seed=0).evaluation[-1].example_id
    path = Path(data.path)
    lines = []
    for line in path.read_text().splitlines():
        is_last = json.loads(line)["id"] == last
        lines.append(line.replace("The code", "The very " + "long " * 100 + "code", 1) if is_last else line)
    path.write_text("\n".join(lines) + "\n")
    number = 1 + next(number for number, line in enumerate(lines) if "long" in line)
    words = rf"^example {last} \(data.jsonl, line {number}\): prompt of \d+ tokens .+ exceed the model's context of 512"
    with pytest.raises(UserError, match=words):
        describe(recipe)
    with pytest.raises(UserError, match=words):  # from the prepared examples
        run_study(recipe)


@pytest.mark.parametrize("prepared", [False, True])
def test_check_data_warns_of_answers_in_distractors(
    make_recipe: Make, prepared: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    path = Path(recipe.study.data.path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["documents"][1]["text"] += f" Not {record['answers'][0]}."
    path.write_text("\n".join(map(json.dumps, records)))
    if prepared:
        claim_storage(recipe.storage, recipe.name)
        stage = make_plan(recipe).prepare
        context: Any = None  # this stage reads none
        stage.run(stage, context)
    warn_once.cache_clear()
    capsys.readouterr()
    describe(recipe)
    count = recipe.study.data.eval_examples
    assert f"warning: prepare: {count} of {count} evaluated questions have an answer" in capsys.readouterr().err


def test_check_prompts_stops_a_run_after_its_data_is_prepared(
    make_recipe: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"exceed the model's context of 200"):
        run_study(make_recipe(model={"max_length": 200}))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["prepare"]


def test_check_data_reads_the_first_records_of_a_large_file(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "_MAX_DATA_BYTES", 100)
    monkeypatch.setattr(data_checks, "_FIRST_RECORDS", 5)
    recipe = make_recipe()
    path = Path(recipe.study.data.path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], "broken"]))
    describe(recipe)  # the broken line is not among the first
    path.write_text("\n".join([*lines[:4], "broken"]))
    with pytest.raises(UserError, match=r"line 5: not valid JSON"):
        describe(recipe)


def test_a_sweep_is_checked_whole_before_its_first_study(make_recipe: Make, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = {"sampling.max_new_tokens": [8, 512]}
    with pytest.raises(UserError, match=r"sampling.max_new_tokens: 512, but prompt and response together"):
        run_study(make_recipe(sweep=sweep))
    assert capsys.readouterr().out == ""


def test_preflight_of_finished_stages_checks_the_owner_alone(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    recipe = make_recipe()
    preflight.preflight(recipe, make_plan(recipe), [])


def test_gold_answers_are_not_trained_on_in_a_thought(
    make_recipe: Make, tiny_model_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model_path, tmp_path / "thinking")
    template = CHAT_TEMPLATE + "{% if enable_thinking is not false %}<think>\n{% endif %}"
    (tmp_path / "thinking" / "chat_template.jinja").write_text(template)
    model: dict[str, Any] = {"path": str(tmp_path / "thinking")}
    with pytest.raises(UserError) as caught:
        run(make_recipe(model=model, method={"name": "sft"}))
    assert str(caught.value) == (
        f"method.name: 'sft' trains on the data set's answers, but the chat template of {model['path']} begins a "
        f"thought (<think>) that they do not end; switch thinking off (model.chat_template_kwargs), or choose another "
        f"method"
    )
    run(make_recipe(model=model, method={"name": "seqkd"}))
    run(make_recipe(model={**model, "chat_template_kwargs": {"enable_thinking": False}}, method={"name": "sft"}))
