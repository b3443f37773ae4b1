"""Real servers of models on loopback, and what the toy answers there and in this process."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pos2distill.config.load import load_recipe
from pos2distill.evaluation.result import Evaluation
from tests.support.commands import run_evaluate
from tests.support.heads import free_ports
from tests.support.paths import PROJECT

START_SECONDS = 600
"""The time limit of a server's start: on busy cores it takes minutes."""

TOY = PROJECT / "examples" / "toy" / "base"

VLLM_SERVE = ("vllm.entrypoints.openai.api_server", "--max-model-len", "400", "--enforce-eager")
"""Module and options. Its context holds prompts of 30 documents of the toy (372 tokens), but not of 40 (492).

Not `vllm serve`, which asks for the version of the package `vllm`: the CPU build of 0.32 is called otherwise. This is
the module behind it, with the same options.
"""


@contextmanager
def served(command: Sequence[str], folder: Path, python: str | Path = sys.executable) -> Iterator[str]:
    """The base URL of a server while it runs: on loopback, in fp32 as the recipe's model, so that ties are equal.

    Its cache of the hub's is missing, as on a fresh machine.

    Args:
        command: a module and its options.
        folder: where it runs and writes its log.
        python: that of the environment with the module.
    """
    (port,) = free_ports(1)
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "no-cache"),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    # It must not find this project by the path of the tests.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(python), "-m", *command, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(words, cwd=folder, stdout=file, stderr=file, env={**environment, **settings})
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def _wait_until_ready(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no answer within {START_SECONDS} s: {log.read_text()[-3000:]}")


def settings_of_server(base_url: str, model: str) -> list[str]:
    return ["model.engine=openai", f"runtime.endpoint.base_url={base_url}", f"runtime.endpoint.served_model={model}"]


def evaluate_toy(storage: Path, *settings: str) -> Evaluation:
    """The toy on 30 documents, where it has a curve."""
    small = ["data.eval_examples=15", "evaluation.slots=4", "evaluation.other_documents=[]"]
    small += [f"runtime.storage={storage}", "runtime.executor=local"]
    (evaluation,) = run_evaluate(load_recipe("quickstart", [*small, *settings]))
    return evaluation


def assert_same_answers(served: Evaluation, direct: Evaluation) -> None:
    keys = ["example_id", "documents", "placement"]
    answers, expected = (each.to_pandas().set_index(keys) for each in (served, direct))
    assert served.curve.accuracy_by_slot == direct.curve.accuracy_by_slot
    # Also of wrong answers.
    assert (answers["text"].str.strip() == expected["text"].str.strip()).mean() > 0.97
    assert (answers["prompt_tokens"] == expected["prompt_tokens"]).all()
