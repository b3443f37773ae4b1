"""Real servers on loopback: the engine `openai` measures what the engines `hf` and `vllm` measure in this process."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pos2distill.config.load import load_recipe
from pos2distill.errors import UserError
from pos2distill.evaluation.result import Evaluation
from tests.support.commands import run_evaluate
from tests.support.heads import free_ports
from tests.support.paths import PROJECT

# On busy cores, servers take minutes to start.
_START_SECONDS = 600
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compute"), pytest.mark.timeout(2 * _START_SECONDS)]

TOY = str(PROJECT / "examples" / "toy" / "base")


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[str]:
    """The base URL of a server while it runs: on loopback, in fp32 as the recipe's model, so that ties are equal.

    Its cache of the hub's is missing, as on a fresh machine.
    """
    (port,) = free_ports(1)
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(log.parent / "no-cache"),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    words = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    with log.open("w") as file:
        server = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, **settings})
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def _wait_until_ready(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no answer within {_START_SECONDS} s: {log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Evaluation]:
    """`evaluate(setting, …)`: the toy on 30 documents, where it has a curve."""

    def run(*settings: str) -> Evaluation:
        small = ["data.eval_examples=15", "evaluation.slots=4", "evaluation.other_documents=[]"]
        small += [f"runtime.storage={tmp_path_factory.mktemp('run')}", "runtime.executor=local"]
        (evaluation,) = run_evaluate(load_recipe("quickstart", [*small, *settings]))
        return evaluation

    return run


@pytest.fixture(scope="module")
def direct(evaluate: Callable[..., Evaluation]) -> Evaluation:
    """By the engine `hf`."""
    evaluation = evaluate("model.engine=hf", "runtime.samplers.threads=1")
    assert evaluation.curve.gap > 0.3
    return evaluation


@pytest.fixture(scope="module")
def direct_vllm(evaluate: Callable[..., Evaluation]) -> Evaluation:
    """By the engine `vllm`, which runs the model in processes of its own."""
    settings = ["runtime.vllm.enforce_eager=true", "runtime.vllm.cpu_kv_cache_gib=1", "model.max_length=1024"]
    return evaluate("model.engine=vllm", "runtime.samplers.threads=1", *settings)


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The settings of a server whose context holds prompts of 30 documents (372 tokens), but not of 40 (492).

    Its model recommends a penalty for repetitions, with which the toy would hardly answer.
    """
    folder = tmp_path_factory.mktemp("toy")
    shutil.copytree(TOY, folder, dirs_exist_ok=True)
    recommended = json.loads((folder / "generation_config.json").read_text()) | {"repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    # Not `vllm serve`, which asks for the version of the package `vllm`: the CPU build of 0.32 is called otherwise.
    command = ["vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "toy"]
    log = tmp_path_factory.mktemp("server") / "log"
    with started([*command, "--max-model-len", "400", "--enforce-eager"], log) as base_url:
        yield ["model.engine=openai", f"runtime.endpoint.base_url={base_url}", "runtime.endpoint.served_model=toy"]


def assert_same(served: Evaluation, direct: Evaluation) -> None:
    keys = ["example_id", "documents", "placement"]
    answers, expected = (each.to_pandas().set_index(keys) for each in (served, direct))
    assert served.curve.accuracy_by_slot == direct.curve.accuracy_by_slot
    # Also of wrong answers.
    assert (answers["text"].str.strip() == expected["text"].str.strip()).mean() > 0.97
    assert (answers["prompt_tokens"] == expected["prompt_tokens"]).all()


def test_openai_measures_what_the_engine_measures_on_transformers_serve(
    evaluate: Callable[..., Evaluation], direct: Evaluation, tmp_path: Path
) -> None:
    with started(["transformers.cli.transformers", "serve", TOY, "--device", "cpu"], tmp_path / "log") as base_url:
        server = [f"runtime.endpoint.base_url={base_url}", f"runtime.endpoint.served_model={TOY}"]
        assert_same(evaluate("model.engine=openai", *server, "runtime.endpoint.concurrency=4"), direct)


def test_openai_measures_what_the_engine_measures_on_vllm(
    evaluate: Callable[..., Evaluation], direct: Evaluation, direct_vllm: Evaluation, vllm_server: list[str]
) -> None:
    assert_same(direct_vllm, direct)
    assert_same(evaluate(*vllm_server, "model.api=chat"), direct_vllm)
    assert_same(evaluate(*vllm_server, "model.api=completions"), direct_vllm)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_openai_rejects_prompts_beyond_the_context_of_vllm(
    evaluate: Callable[..., Evaluation], vllm_server: list[str], api: str
) -> None:
    """The server names its context in its list of models."""
    with pytest.raises(UserError, match="serves the model with a context of 400 tokens, but the prompt of"):
        evaluate(*vllm_server, f"model.api={api}", "data.documents=40")
