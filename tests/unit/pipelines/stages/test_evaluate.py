"""The command `evaluate` on a model behind a server, which has no model and answers by a rule."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import command_line
from pipelines.progress_bar import StageProgress
from pos2distill import hardware
from pos2distill.config import ModelSection, Recipe
from pos2distill.config.evaluation_recipe import evaluation_recipe
from pos2distill.models.load import load_tokenizer
from tests.support.commands import run_study
from tests.support.endpoint import FakeServer, serve
from tests.support.paths import PROJECT
from tests.support.results import artifact_of, read_steps
from tests.support.tiny import write_examples

KEY = "key-of-the-server"


def answer_with_the_first(prompt: Any) -> str:
    """The code in the first document, which is the right one only if the gold document is the first."""
    return str(prompt).partition("is ")[2].partition(".")[0]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A server; the working directory has 40 questions in `questions.jsonl`."""
    write_examples(tmp_path / "questions.jsonl", 40, 6)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVER_KEY", KEY)
    with serve(FakeServer(answer=answer_with_the_first, key=KEY)) as started:
        yield started


def evaluate(server: FakeServer, *words: str) -> int:
    named = ["evaluate", "--model", "tiny", "--data", "questions.jsonl", "--base-url", server.url]
    settings = ["data.prompt=plain", "data.documents=4", "runtime.endpoint.api_key_env=SERVER_KEY"]
    return command_line.main([*named, "--slots", "all", "--examples", "20", *settings, *words])


def test_evaluate_shows_how_many_answers_are_correct_so_far(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    update = StageProgress.update

    def record(self: StageProgress, count: int, note: str = "") -> None:
        notes.append(note)
        update(self, count, note)

    monkeypatch.setattr(StageProgress, "update", record)
    assert evaluate(server, "runtime.samplers.batch_size=16") == 0
    counted = [tuple(map(int, re.findall(r"\d+", note))) for note in notes]
    assert len(counted) > 1
    assert [answers for _, answers in counted] == [16 * number for number in range(1, 6)]
    # Correct where the gold document is the first of four.
    assert [correct for correct, _ in counted] == [4 * number for number in range(1, 6)]
    assert notes[0] == "correct 4 of 16 so far"


@pytest.mark.parametrize(
    ("documents", "overrides", "slots"), [(None, (), 5), (2, (), 2), (None, ("data.documents=3",), 3)]
)
def test_evaluation_recipe_has_five_slots_or_as_many_as_there_are(
    documents: int | None, overrides: tuple[str, ...], slots: int
) -> None:
    recipe = evaluation_recipe("a/base", "q.jsonl", documents=documents, overrides=overrides)
    assert recipe.study.evaluation.slots == slots


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_evaluation_recipe_runs_on_ray_with_any_precision_and_workers_that_it_ignores(dtype: str) -> None:
    overrides = ["runtime.executor=ray", "runtime.trainers={workers: 4}", f"model.dtype={dtype}"]
    assert evaluation_recipe("a/base", "q.jsonl", overrides=overrides).runtime.trainers.workers == 4


@pytest.mark.parametrize(("gpus", "found", "on_gpu"), [(2, 2, True), (2, 0, False), (0, 0, False)])
def test_evaluation_recipe_uses_a_gpu_that_torch_can_use(
    monkeypatch: pytest.MonkeyPatch, gpus: int, found: int, *, on_gpu: bool
) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: gpus)
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    recipe = evaluation_recipe("a/base", "q.jsonl")
    assert recipe.runtime.samplers.gpus == on_gpu
    assert recipe.runtime.samplers.batch_size == (32 if on_gpu else 8)
    assert recipe.study.model.dtype == ("bfloat16" if on_gpu else ModelSection(path="m", dtype="auto").dtype)
    on_cpus = evaluation_recipe("a/base", "q.jsonl", overrides=["runtime.samplers.gpus=0"])
    assert (on_cpus.runtime.samplers.gpus, on_cpus.runtime.samplers.batch_size) == (0, 8)
    assert on_cpus.study.model.dtype == ModelSection(path="m", dtype="auto").dtype
    on_server = evaluation_recipe("qwen", "q.jsonl", base_url="http://127.0.0.1:1/v1")
    assert (on_server.runtime.samplers.gpus, on_server.study.model.dtype) == (0, "bfloat16")
    on_ray = evaluation_recipe("a/base", "q.jsonl", overrides=["runtime.executor=ray", "model.dtype=float32"])
    assert on_ray.runtime.executor == "ray"


def test_evaluation_recipe_uses_the_cpus_of_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_cpus", lambda: 3)
    assert evaluation_recipe("a/base", "q.jsonl").runtime.samplers.threads == 3


def test_evaluate_as_json_is_of_the_data_that_it_began_with(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another data set, or another commit of a model on the hub, would be another run."""

    def answer(prompt: Any) -> str:
        write_examples(tmp_path / "questions.jsonl", 41, 6)
        return answer_with_the_first(prompt)

    server.answer = answer
    assert evaluate(server, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["curves"]) == ["base"]
    assert set(result["studies"][0]["stages"]) == {"prepare", "evaluate base"}


def test_evaluate_measures_a_served_model(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = ["runtime.endpoint.price_input=2", "runtime.endpoint.price_output=5"]
    prices.append("evaluation.retriever_ranks=[3, 1]")
    assert evaluate(server, *prices) == 0
    assert len(server.bodies) == 80
    assert set(server.answered.values()) == {1}
    storage = tmp_path / "runs" / "tiny-questions"
    summary = json.loads((storage / "evaluation" / "summary.json").read_text())
    (curve,) = summary["base"]["curves"]
    assert (curve["slots"], curve["accuracy_by_slot"]) == ([0, 1, 2, 3], [1, 0, 0, 0])
    assert summary["base"]["verdict"] == "Accuracy at position 2 of 4 is 100 points lower than at position 1."
    # Right at the first slot only, where the gold document is in 3 of 4 prompts.
    assert summary["base"]["expected"]["accuracy"] == 0.75
    words = sum(len(body["messages"][0]["content"].split()) for body in server.bodies)
    assert summary["base"]["counts"]["prompt_tokens"] == words
    assert summary["base"]["counts"]["answer_tokens"] == 80
    assert summary["base"]["cost"] == pytest.approx((2 * words + 5 * 80) / 1e6)
    assert (storage / "evaluation" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    page = (storage / "evaluation" / "index.html").read_text()
    assert "Accuracy at position 2 of 4 is 100 points lower than at position 1." in page
    printed = capsys.readouterr().out
    assert f"tokens      {words} of prompts, 80 of answers, cost 0.01" in printed
    assert "expected    0.750 [" in printed
    # The key is written nowhere.
    for path in storage.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()
    # The gate reads the stored answers; nothing is asked again.
    assert evaluate(server, *prices, "--fail-if-gap-above", "5") == 1
    assert capsys.readouterr().err.startswith("gate failed: GAP 100.0, ")
    assert len(server.bodies) == 80


def test_evaluate_asks_without_documents_and_with_the_gold_document_alone(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(server, "evaluation.reference_prompts=true") == 0
    summary = json.loads((tmp_path / "runs" / "tiny-questions" / "evaluation" / "summary.json").read_text())["base"]
    assert summary["counts"]["prompts"] == 120
    # The server answers from the first document: right if it is the gold one, nothing if there is none.
    assert summary["references"]["closed_book"]["accuracy"] == 0
    assert summary["references"]["gold_alone"]["accuracy"] == 1
    assert summary["curves"][0]["mean"] == 0.25
    messages = [body["messages"][0]["content"] for body in server.bodies]
    assert sum(message.startswith("Question: ") for message in messages) == 20
    assert sum(message.count("Title: ") == 1 for message in messages) == 20
    printed = capsys.readouterr().out
    assert "reference   0.000 [0.000, 0.161] without documents" in printed
    assert "reference   1.000 [0.839, 1.000] gold documents alone" in printed


def test_evaluate_judges_what_follows_a_thought(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Thoughts name the first document's code, as the answers do. Those about foxes of odd numbers do not end."""
    ended = set()

    def answer(prompt: str) -> str:
        fox = prompt.rpartition("Fox")[2][:4]
        thought = f"<think>\nIt is {answer_with_the_first(prompt)}\n"
        if int(fox) % 2:
            return thought
        ended.add(fox)
        return f"{thought}</think>\n\n{answer_with_the_first(prompt)}"

    server.answer = answer
    assert evaluate(server, "model.chat_template_kwargs={enable_thinking: true}") == 0
    assert {str(body["chat_template_kwargs"]) for body in server.bodies} == {"{'enable_thinking': True}"}
    printed = capsys.readouterr()
    unfinished = 80 - 4 * len(ended)
    assert (
        f"warning: evaluate base: 80 of 80 answers begin with a thought (<think>), of which {unfinished} do not end, "
        "so that the answer is wrong; raise evaluation.max_new_tokens, or switch thinking off, in many models by "
        "model.chat_template_kwargs={enable_thinking: false}\n"
    ) in printed.err
    # Right at the first of four slots.
    assert f"correct {len(ended)}, wrong {80 - len(ended)}, " in printed.out
    assert f", thoughts 80, unfinished thoughts {unfinished}, " in printed.out


def test_inspect_shows_the_message_that_a_server_got(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.counts_tokens = False
    assert evaluate(server) == 0
    capsys.readouterr()
    storage = str(tmp_path / "runs" / "tiny-questions")
    assert command_line.main(["inspect", storage, "--prompts", "--limit", "0", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["prompt"] for row in rows} == {body["messages"][0]["content"] for body in server.bodies}
    assert command_line.main(["inspect", storage, "--position", "3", "--limit", "1"]) == 0
    assert "position  3 of 4: wrong\n" in capsys.readouterr().out


def test_evaluate_sends_the_token_ids_of_other_engines(
    server: FakeServer, tiny_model_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--model={tiny_model_path}", "model.api=completions", "runtime.endpoint.served_model=tiny"]
    assert evaluate(server, *words) == 0
    # The server's rule needs text, so no answer is correct.
    assert "No answer is correct" in capsys.readouterr().out
    texts = set()
    for body in server.bodies:
        recipe_model = evaluation_recipe(tiny_model_path, "questions.jsonl").study.model
        texts.add(str(load_tokenizer(recipe_model).decode(body["prompt"])))
    assert len(texts) == 80
    for text in texts:
        assert text.startswith("<s><|user|>Title: Fox")
        assert text.endswith("<|end|><|assistant|>")


def test_evaluate_uses_a_chat_template_that_was_changed_in_this_process(
    server: FakeServer, tiny_model_path: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "tiny")
    words = [f"--model={folder}", "model.api=completions", "runtime.endpoint.served_model=tiny"]
    assert evaluate(server, *words) == 0
    before = sorted(len(body["prompt"]) for body in server.bodies)
    server.bodies.clear()
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ 'Answer:' }}")
    assert evaluate(server, *words) == 0
    after = sorted(len(body["prompt"]) for body in server.bodies)
    assert after == [length + len("Answer:") for length in before]
    summary = json.loads((tmp_path / "runs" / "tiny-questions" / "evaluation" / "summary.json").read_text())
    assert summary["base"]["counts"]["prompt_tokens"] == sum(after)


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_evaluate_asks_nothing_if_prompts_exceed_the_context_of_the_server(
    server: FakeServer, tiny_model_path: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server.max_model_len = 80
    completions = [f"--model={tiny_model_path}", "model.api=completions", "runtime.endpoint.served_model=tiny"]
    for settings, tokens in (([], "at least "), (completions, "")):
        assert evaluate(server, *settings, "evaluation.max_new_tokens=60", *words) == 2
        error = capsys.readouterr().err
        assert f"{server.url}: serves the model with a context of 80 tokens, but the prompt of example " in error
        assert f" has {tokens}" in error
        assert error.count("error: ") == 1
    assert server.bodies == []


def test_evaluate_warns_if_the_server_counts_no_tokens(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.counts_tokens = False
    assert evaluate(server) == 0
    warning = "evaluate base: the server counted no tokens in 80 of 80 prompts, so nothing shows whether it cut them"
    assert f"warning: {warning}\n" in capsys.readouterr().err
    assert (
        f"<b>Warning:</b> {warning}."
        in (tmp_path / "runs" / "tiny-questions" / "evaluation" / "index.html").read_text()
    )


def test_dry_run_warns_of_a_model_that_cannot_read_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    data = PROJECT / "examples" / "own_data" / "questions.jsonl"
    words = ["evaluate", "--model", str(PROJECT / "examples" / "toy" / "base"), "--data", str(data), "--dry-run"]
    assert command_line.main([*words, "--documents", "8", "data.distractors=random"]) == 0
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ")
    assert "its tokenizer does not know " in warning
    assert warning.count("\n") == 1
    assert command_line.main(["study", "quickstart", "--dry-run"]) == 0
    assert "does not know" not in capsys.readouterr().err


def test_results_of_a_file_are_in_a_folder_without_its_suffixes() -> None:
    for name in ("q.jsonl", "q.json", "q.jsonl.gz", "q.parquet", "q.ndjson", "Q.JSONL.GZ"):
        assert evaluation_recipe("a/base", f"data/{name}").name == "base-q"


def test_results_of_a_pattern_are_named_after_its_folder_if_it_has_no_name() -> None:
    for pattern, name in (
        ("real/*.jsonl", "real"),
        ("/data/raw/*.jsonl", "raw"),
        ("raw/v1/*/q.jsonl", "v1-q"),
        ("raw/part-*.jsonl.gz", "part"),
        ("/*.jsonl", None),
    ):
        assert evaluation_recipe("a/base", pattern).name == (f"base-{name}" if name else "base")


def test_results_of_a_checkpoint_are_named_after_its_run() -> None:
    """All of them are folders called `model`."""
    name = evaluation_recipe("runs/mine/checkpoint-f1a0cc6c0d9abc2e/model/", "q.jsonl").name
    assert name == "mine-f1a0cc6c-q"
    assert evaluation_recipe("some/model", "q.jsonl").name == "model-q"
    assert evaluation_recipe("model", "q.jsonl").name == "model-q"
    assert evaluation_recipe(".", "q.jsonl").name == "q"


def test_evaluate_warns_of_questions_that_a_checkpoint_was_trained_on(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The study holds out half of the questions, and `--model` takes all of them."""
    recipe = make_recipe(model={"engine": "fake"}, method={"name": "sft"}, runtime={"executor": "local"})
    run_study(recipe)
    checkpoint = artifact_of(recipe, "distill")
    trained = {example for step in read_steps(recipe) for example in step["examples"]}
    words = ["evaluate", "--model", f"{checkpoint.path}/model", "--data", recipe.study.data.path, "--slots", "1"]
    words += ["data.prompt=plain", "data.documents=4", "model.engine=fake"]

    def warnings(fraction: float, examples: int) -> list[str]:
        capsys.readouterr()
        settings = [f"data.eval_fraction={fraction}", f"runtime.storage={tmp_path / str(fraction)}"]
        assert command_line.main([*words, "--examples", str(examples), *settings]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "was trained on" in line]

    (line,) = warnings(1, 40)
    assert f"was trained on {len(trained)} of these 40 questions, so it may look too good" in line
    assert warnings(recipe.study.data.eval_fraction, 4) == []
    # Other questions with the same ids.
    data = Path(recipe.study.data.path)
    data.write_text(data.read_text().replace("Which code", "Which secret code"))
    assert warnings(0.999, 20) == []


def test_evaluate_takes_all_questions_of_a_small_file(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """40 questions are fewer than the default, but not fewer than what is asked for."""
    words = ["evaluate", "--model", "tiny", "--data", "questions.jsonl", "--base-url", server.url, "--slots", "2"]
    words += ["data.prompt=plain", "data.documents=4", "runtime.endpoint.api_key_env=SERVER_KEY"]
    assert command_line.main(words) == 0
    assert len(server.bodies) == 80
    assert "4 documents, 40 examples at each position" in capsys.readouterr().out
    for many in (["--examples", "41"], ["data.eval_examples=41"]):
        assert command_line.main([*words, *many, "runtime.storage=other"]) == 2
        assert "41" in capsys.readouterr().err


def test_evaluate_continues_after_a_failure(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    small = "runtime.samplers.batch_size=4"
    server.context = 24  # too small for any prompt
    assert evaluate(server, small) == 2
    assert "the engine gave no answer (the server counts 24 tokens in a prompt of" in capsys.readouterr().err
    server.context = None
    server.bodies.clear()
    assert evaluate(server, small) == 0
    assert len(server.bodies) == 80


def test_evaluate_rejects_wrong_addresses_and_names(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.names = ("tiny",)
    for word, message in [
        ("runtime.endpoint.api_key_env=NO_KEY", "api_key_env: the environment variable NO_KEY is not set"),
        ("runtime.endpoint.api_key_env=null", "refuses the key in OPENAI_API_KEY (HTTP 401)"),
        ("--model=tinny", "serves no model 'tinny' (model.path); did you mean 'tiny'?"),
        ("--base-url=http://127.0.0.1:9/v1", "no server answers"),
        ("--dry-run", ""),
    ]:
        assert evaluate(server, word) == (2 if message else 0)
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == bool(message)
    # Distinguishes the models that a name had at different times.
    assert evaluate(server, "model.revision=july", "--dry-run") == 0
    assert server.bodies == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate"], "evaluate: expected a RECIPE, or --model and --data"),
        (
            ["evaluate", "--model", "m", "--data", "d", "--documents", "8", "data.documents=6"],
            "--documents: data.documents is set too; give one of them",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "--slots", "3", "evaluation={max_new_tokens: 20}"],
            "--slots: evaluation.slots would be replaced with its whole section evaluation; set fields of the section "
            "instead, as evaluation.FIELD",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "model.path=b"],
            "error: --model: model.path is set too; give one of them\n",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "model={path: b}"],
            "error: --model: model.path would be replaced with its whole section model; set fields of the section",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "data.path=b"],
            "error: --data: data.path is set too; give one of them\n",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "--base-url", "http://x/v1", "runtime.endpoint.base_url=b"],
            "error: --base-url: runtime.endpoint.base_url is set too; give one of them\n",
        ),
        *(
            (
                ["evaluate", "--model", "m", "--data", "d", "--slots", slots],
                "error: --slots: no value; expected a number of slots, all, or a list, for example [0, 9]\n",
            )
            for slots in ("", " ", "null")
        ),
        (["evaluate", "--model", "m"], "--data: missing; expected the file with the questions"),
        (
            ["evaluate", "--model", "m", "data.path=q.jsonl"],
            "--data: missing; expected the file with the questions instead of data.path",
        ),
        (
            ["evaluate", "quickstart", "--model", "m", "--data", "d"],
            "evaluate: quickstart: expected either a RECIPE or --model and --data, not both",
        ),
        (
            ["evaluate", __file__, "--model", "m", "--data", "d"],
            f"evaluate: {__file__}: expected either a RECIPE or --model and --data, not both; put a pattern of several "
            f"files in quotes",
        ),
        (
            ["evaluate", "quickstart", "--base-url", "http://x/v1"],
            "--base-url: goes with --model; with a recipe, set runtime.endpoint.base_url=VALUE",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "--slots", "[1"],
            "--slots: cannot read the value: ",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "--slots", "9", "--documents", "4"],
            "--slots: 9 slots, but there are 4; lower it, or set it to all",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "--examples", "0"],
            "--examples: input should be greater than or equal to 1, got 0",
        ),
        (["evaluate", "--model", "m", "--data", "d", "--documents", "1"], "--documents: input should be greater than"),
        (
            ["evaluate", "--model", "m", "--data", "d", "evaluation.slots=21"],
            "evaluation.slots: 21 slots, but there are 20",
        ),
        (
            ["evaluate", "--model", "m", "--data", "d", "--base-url", "localhost"],
            "--base-url: expected a URL, for example http://127.0.0.1:8000/v1",
        ),
        (
            ["evaluate", "quickstart", "model.engine=openai"],
            "runtime.endpoint.base_url: missing; model.engine openai needs it, for example http://127.0.0.1:8000/v1",
        ),
        (
            ["evaluate", "quickstart", "runtime.endpoint.api_key_env=sk-1234567890123456789"],
            "runtime.endpoint.api_key_env: expected the name of an environment variable, not a key",
        ),
        (
            ["evaluate", "quickstart", "runtime.endpoint.base_url=http://me:" + "secret@x/v1"],
            "command line: runtime.endpoint.base_url: contains what looks like a secret; set it in the environment",
        ),
        (
            ["evaluate", "quickstart", "runtime.endpoint.price_input=1"],
            "runtime.endpoint.price_input: needs price_output, and the reverse",
        ),
        (
            ["evaluate", "quickstart", "inference.method=reorder", "data.train_examples=0"],
            "data.train_examples: 0, but inference.method 'reorder' measures on training examples",
        ),
        (
            ["evaluate", "quickstart", "inference.method=lpes", "data.train_examples=0"],
            "data.train_examples: 0, but inference.method 'lpes' measures on training examples",
        ),
        (
            ["evaluate", "quickstart", "inference.method=lpes", "model.engine=openai"],
            "inference.method: 'lpes' changes the model, which a server keeps as it is; set model.engine to hf",
        ),
        (
            ["evaluate", "quickstart", "inference.method=ms_poe", "model.engine=openai"],
            "inference.method: 'ms_poe' changes the model, which a server keeps as it is; set model.engine to hf",
        ),
        (
            ["study", "quickstart", "data.train_examples=0"],
            "data.train_examples: 0 is for the command evaluate only: there is nothing to train on; set "
            "data.train_examples and data.eval_fraction",
        ),
    ],
)
def test_evaluate_rejects_settings_that_do_not_fit(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("command", ["study", "analyze", "sample", "distill"])
def test_commands_that_train_reject_a_server(
    make_recipe: Callable[..., Recipe], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recipe(model={"engine": "openai"}, runtime={"endpoint": {"base_url": "http://127.0.0.1:9/v1"}})
    for words in ([], ["--dry-run"]):
        assert command_line.main([command, str(tmp_path / "recipe.yaml"), *words]) == 2
        assert capsys.readouterr().err.startswith("error: model.engine: 'openai' is for the command evaluate only: ")


TEMPLATE = {
    "system": "You answer from the context alone.",
    "user": "Context:\n{documents}\n\nQuestion: {question}",
    "document": "[{number}] {text}",
    "without_documents": "No context. {question}",
}


def test_evaluate_asks_with_a_prompt_of_ones_own(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "--model", "tiny", "--data", "questions.jsonl", "--base-url", server.url, "--documents", "4"]
    words += ["--examples", "10", "--slots", "2", "evaluation.reference_prompts=true"]
    words += ["runtime.endpoint.api_key_env=SERVER_KEY", f"data.template={json.dumps(TEMPLATE)}"]
    assert command_line.main([*words, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert "#   | You answer from the context alone." in dry
    assert "    user: 'Context:" in dry
    assert command_line.main(words) == 0
    assert len(server.bodies) == 10 * (2 + 2)
    alone = 0
    for body in server.bodies:
        system, user = body["messages"]
        assert system == {"role": "system", "content": TEMPLATE["system"]}
        if user["content"].startswith("No context. Which code has Fox"):
            alone += 1
        else:
            assert re.fullmatch(
                r"Context:\n\[1\] The code of .+\.(\n\n\[\d\] .+){0,3}\n\nQuestion: Which code has .+\?",
                user["content"],
            )
    assert alone == 10
    capsys.readouterr()
    storage = tmp_path / "runs" / "tiny-questions"
    assert command_line.main(["inspect", str(storage), "--prompts", "--position", "1", "--limit", "1", "--json"]) == 0
    prompt = json.loads(capsys.readouterr().out)["prompt"]
    assert prompt in {"\n\n".join(message["content"] for message in body["messages"]) for body in server.bodies}
    # The answer is that of the first document, so the prompts were understood.
    (summary,) = json.loads((storage / "evaluation" / "summary.json").read_text())["base"]["curves"]
    assert summary["accuracy_by_slot"] == [1, 0]
