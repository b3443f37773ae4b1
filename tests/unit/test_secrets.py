"""Credentials of many providers in every place that leaves this machine, and strings that only look like one."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cluster.spec import load_cluster
from pipelines.cli import command_line
from pipelines.jobs.bundle import pack, packed_files
from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.secrets import MASK, file_holds_secret, holds_secret, looks_secret, mask_secrets
from tests.support.commands import run_study
from tests.support.credentials import HARMLESS, credentials
from tests.support.paths import PROJECT

PLANTED = credentials()
NAMES = list(PLANTED)
QUICKSTART = PROJECT / "pipelines" / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_looks_secret_recognizes(name: str) -> None:
    text, secret = PLANTED[name]
    assert looks_secret(text)
    masked = mask_secrets(f"before {text} after")
    assert MASK in masked
    assert secret not in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")


@pytest.mark.parametrize("text", HARMLESS)
def test_looks_secret_accepts(text: str) -> None:
    assert not looks_secret(text)
    assert mask_secrets(text) == text
    name, separator, value = text.partition("=")
    if separator and name.isupper():
        assert not holds_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        *(
            (name, "x", True)
            for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "WANDB_API_KEY", "MY_PWD")
        ),
        *((name, "hunter2", True) for name in ("PGPASSWORD", "HFTOKEN", "SENTRY_DSN", "clientSecret", "SSH_KEY")),
        *((name, "x", False) for name in ("PUBLIC_KEY", "SORT_KEY", "PASSENGERS", "TOKENS", "KEYBOARD", "TOKEN_TYPE")),
        ("DB_PASSWORD", "12345678", True),
        ("NOTE", "0123456789abcdef0123456789abcdef", False),
    ],
)
def test_holds_secret_goes_by_the_name(name: str, value: str, secret: bool) -> None:
    assert holds_secret(name, value) is secret


@pytest.mark.parametrize(
    "line",
    [
        "prod/db-password: correcthorse",
        "pass: correcthorse # of the mailer",
        "smtp-pass: correcthorse",
        "smtp: {user: me, pass: correcthorse}",
        "smtp: {pass: correcthorse, user: me}",
        'smtp: {pass: correcthorse, "user": me}',
    ],
)
def test_looks_secret_distinguishes_a_setting_from_a_sentence(line: str) -> None:
    assert mask_secrets(line) == line.replace("correcthorse", MASK)
    assert not looks_secret(line.replace("correcthorse", "expected another"))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """A command's exit code and all that it prints."""
    try:
        code = command_line.main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("name", NAMES)
def test_no_command_repeats_a_secret(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, secret = PLANTED[name]
    quoted = json.dumps(text)
    recipe = tmp_path / "mine.yaml"
    raw = yaml.safe_load(QUICKSTART.read_text())
    recipe.write_text(yaml.safe_dump({**raw, "model": {**raw["model"], "path": text}}, width=10_000))
    spec = tmp_path / "spec.yaml"
    raw = yaml.safe_load((PROJECT / "cluster" / "presets" / "gke.yaml").read_text())
    spec.write_text(yaml.safe_dump({**raw, "pods": {"env": {"NOTE": text}}}, width=10_000))
    commands = (
        ["study", str(recipe), "--dry-run"],
        ["study", "quickstart", f"data.path={quoted}", "--dry-run"],
        ["study", "quickstart", f"training.epochs={quoted}", "--dry-run"],
        ["study", "quickstart", f"runtime.storage=s3://bucket/{text}", "--dry-run"],
        ["cluster", "render", str(spec)],
        ["cluster", "render", "gke", f"spec.pods.user={quoted}"],
        ["cluster", "render", "gke", "nq_mistral_7b", f"data.path={quoted}"],
        ["submit", "quickstart", f"data.path={quoted}", "--address", "http://127.0.0.1:1"],
    )
    for words in commands:
        code, printed = run(words, capsys)
        assert code == 2, (words, printed)
        assert secret not in printed
        assert printed.count("\n") == 1, printed


@pytest.mark.parametrize("name", NAMES)
def test_pack_rejects_a_file_with_a_secret(name: str, tmp_path: Path) -> None:
    text, secret = PLANTED[name]
    folder = tmp_path / "project" / "examples"
    folder.mkdir(parents=True)
    # At the end of more than a mebibyte of harmless lines.
    lines = "\n".join(HARMLESS) + "\n"
    (folder / "notes.txt").write_text(lines * (2**20 // len(lines) + 2) + text + "\n")
    with pytest.raises(UserError, match=r"^examples/notes.txt: contains what looks like a secret; remove it") as caught:
        pack(tmp_path / "packed", packed_files(folder.parent), None, folder.parent)
    assert secret not in str(caught.value)
    assert not list((tmp_path / "packed").rglob("*.*"))


def test_pack_takes_files_with_harmless_strings(tmp_path: Path) -> None:
    folder = tmp_path / "project" / "examples"
    folder.mkdir(parents=True)
    for kind in ("txt", "yaml", "json", "toml", "md", "py", "jsonl"):
        (folder / f"notes.{kind}").write_text("\n".join(HARMLESS))
    (folder / "code.py").write_text("token = config.token_of_user_1234\nRESULT_KEY = 'scores_by_slot_2026'\n")
    pack(tmp_path / "packed", packed_files(folder.parent), None, folder.parent)
    assert len(list((tmp_path / "packed" / "examples").iterdir())) == 8


def test_file_holds_secret_reads_compressed_files_and_headers_of_weights(tmp_path: Path) -> None:
    text, _ = PLANTED["Hugging Face"]
    packed, weights = tmp_path / "data.jsonl.gz", tmp_path / "model.safetensors"
    packed.write_bytes(gzip.compress(f'{{"question": "{text}"}}'.encode()))
    header = json.dumps({"__metadata__": {"note": text}}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    assert file_holds_secret(packed)
    assert file_holds_secret(weights)
    packed.write_bytes(gzip.compress(b'{"question": "What is a password: secret words or a token?"}'))
    assert not file_holds_secret(packed)


def test_pack_rejects_a_compressed_file_that_it_cannot_search(tmp_path: Path) -> None:
    folder = tmp_path / "project" / "examples"
    folder.mkdir(parents=True)
    (folder / "data.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(UserError, match=r"^examples/data.jsonl.gz: cannot be read \(Compressed file ended"):
        pack(tmp_path / "packed", packed_files(folder.parent), None, folder.parent)


def test_reject_secrets_names_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = PLANTED["HTTPS URL"]
    assert run(["study", "quickstart", f"model.path={text}", "--dry-run"], capsys) == (
        2,
        "error: command line: model.path: contains what looks like a secret; set it in the environment, or use the "
        "storage's own credentials\n",
    )
    path = tmp_path / "spec.yaml"
    path.write_text(f"name: a\nstorage: {{url: s3://b}}\nhead: {{node_selector: {{'{text}': b}}}}\n")
    with pytest.raises(UserError) as caught:
        load_cluster(str(path))
    assert str(caught.value).startswith(f"{path}: head.node_selector.https://user:{MASK}@host.example.org/m: contains")


@pytest.mark.parametrize(
    "words",
    [
        ["SECRET"],
        ["study", "SECRET"],
        ["study", "quickstart", "SECRET"],
        ["study", "quickstart", "--dry-run=SECRET"],
        ["study", "quickstart", "--token=SECRET"],
        ["cluster", "render", "gke", "--out", "/proc/SECRET"],
        ["cluster", "validate", "gke", "--crds", "SECRET"],
        ["evaluate", "quickstart", "--fail-if-gap-above", "SECRET"],
    ],
)
def test_no_command_repeats_a_secret_in_the_wrong_place(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, secret = PLANTED["Hugging Face"]
    code, printed = run([word.replace("SECRET", secret) for word in words], capsys)
    assert code == 2
    assert MASK in printed
    assert secret not in printed


@pytest.fixture
def environment_of_secrets(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every credential in a variable of this process, as users have theirs."""
    for index, (text, _) in enumerate(PLANTED.values()):
        monkeypatch.setenv(f"PLANTED_{index}", text)
    hugging_face, aws, tracker = (PLANTED[name][1] for name in ("Hugging Face", "AWS secret key", "Weights & Biases"))
    monkeypatch.setenv("HF_TOKEN", hugging_face)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", aws)
    monkeypatch.setenv("WANDB_API_KEY", tracker)
    # The planted secrets of some entries are short words, such as passwords, which texts contain by chance.
    return [secret.encode() for _, secret in PLANTED.values() if len(secret) >= 16]


def assert_no_secret_below(folder: Path, secrets: list[bytes]) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert not any(secret in data for secret in secrets), path


def test_study_writes_no_secret_of_its_environment(
    make_recipe: Callable[..., Recipe],
    environment_of_secrets: list[bytes],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Results, model card, report, logs of a tracker, and what is printed."""
    assert len(environment_of_secrets) >= 25
    recipe = make_recipe(model={"engine": "fake"}, runtime={"executor": "local", "trackers": ["tensorboard"]})
    run_study(recipe)
    assert {"README.md", "index.html"} <= {path.name for path in Path(recipe.storage).rglob("*")}
    assert_no_secret_below(Path(recipe.storage), environment_of_secrets)
    printed = capfd.readouterr()
    assert not any(secret.decode() in printed.out + printed.err for secret in environment_of_secrets)


def test_manifests_and_archives_hold_no_secret_of_the_environment(
    environment_of_secrets: list[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["nq_mistral_7b", "data.path=gs://bucket/x", "runtime.trainers.workers=8"]
    assert run(["cluster", "render", "gke", *words, "--out", str(tmp_path / "manifests")], capsys)[0] == 0
    pack(tmp_path / "packed", packed_files(), None)
    assert_no_secret_below(tmp_path, environment_of_secrets)


def test_no_file_of_the_project_holds_a_secret() -> None:
    files = [PROJECT / path for path in packed_files()]
    for folder in ("tests", "cluster", "docs", "scripts", "requirements"):
        files += [path for path in (PROJECT / folder).rglob("*.*") if path.suffix not in (".pyc", ".png")]
    for path in files:
        assert not file_holds_secret(path), path


def test_help_does_not_load_the_rules() -> None:
    code = (
        "import sys\nfrom pipelines.cli import command_line\n"
        "try:\n    command_line.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "from pos2distill.config.load import load_recipe\nload_recipe('quickstart')\n"
        "print('kingfisher_sdk' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr
