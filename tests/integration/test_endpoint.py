"""Real servers on loopback: the engine `openai` measures what the engines `hf` and `vllm` measure in this process."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pos2distill.errors import UserError
from pos2distill.evaluation.result import Evaluation
from tests.support.served import (
    START_SECONDS,
    TOY,
    VLLM_SERVE,
    assert_same_answers,
    evaluate_toy,
    served,
    settings_of_server,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compute"), pytest.mark.timeout(2 * START_SECONDS)]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Evaluation]:
    """`evaluate(setting, …)` evaluates the toy in a storage of its own."""
    return lambda *settings: evaluate_toy(tmp_path_factory.mktemp("run"), *settings)


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
    """The settings of a server whose model recommends a penalty for repetitions, with which it would hardly answer."""
    folder = tmp_path_factory.mktemp("toy")
    shutil.copytree(TOY, folder, dirs_exist_ok=True)
    recommended = json.loads((folder / "generation_config.json").read_text()) | {"repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    command = (*VLLM_SERVE, "--model", str(folder), "--served-model-name", "toy")
    with served(command, tmp_path_factory.mktemp("server")) as base_url:
        yield settings_of_server(base_url, "toy")


def test_openai_measures_what_the_engine_measures_on_transformers_serve(
    evaluate: Callable[..., Evaluation], direct: Evaluation, tmp_path: Path
) -> None:
    with served(["transformers.cli.transformers", "serve", str(TOY), "--device", "cpu"], tmp_path) as base_url:
        server = settings_of_server(base_url, str(TOY))
        assert_same_answers(evaluate(*server, "runtime.endpoint.concurrency=4"), direct)


def test_openai_measures_what_the_engine_measures_on_vllm(
    evaluate: Callable[..., Evaluation], direct: Evaluation, direct_vllm: Evaluation, vllm_server: list[str]
) -> None:
    assert_same_answers(direct_vllm, direct)
    assert_same_answers(evaluate(*vllm_server, "model.api=chat"), direct_vllm)
    assert_same_answers(evaluate(*vllm_server, "model.api=completions"), direct_vllm)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_openai_rejects_prompts_beyond_the_context_of_vllm(
    evaluate: Callable[..., Evaluation], vllm_server: list[str], api: str
) -> None:
    """The server names its context in its list of models."""
    with pytest.raises(UserError, match="serves the model with a context of 400 tokens, but the prompt of"):
        evaluate(*vllm_server, f"model.api={api}", "data.documents=40")
