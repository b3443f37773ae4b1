import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pos2distill.config import ModelSection
from pos2distill.store.artifacts import Artifact
from pos2distill.training import worker
from pos2distill.training.distributed import DistContext
from pos2distill.training.worker import clear_scratch_folder


def test_clear_scratch_folder_removes_what_dead_workers_left_and_only_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine: Any = SimpleNamespace(checkpoint=SimpleNamespace(url="s3://b/mine"))
    other: Any = SimpleNamespace(checkpoint=SimpleNamespace(url="s3://b/other"))
    first: Any = SimpleNamespace(local_rank=0)
    second: Any = SimpleNamespace(local_rank=1)
    kept = clear_scratch_folder(other, first)
    (kept / "rank-0").mkdir()
    scratch = clear_scratch_folder(mine, first)
    (scratch / "rank-5" / "40-x").mkdir(parents=True)  # left by a rank that now runs on another node
    assert clear_scratch_folder(mine, second) == scratch
    assert (scratch / "rank-5").exists()  # one worker of a node removes it
    assert not list(clear_scratch_folder(mine, first).iterdir())
    assert (kept / "rank-0").exists()


BASE = ModelSection(path="base")


class FakeStrategy:
    """Records the order of its calls and writes a file for each."""

    def __init__(self, rounding: float) -> None:
        self.calls: list[str] = []
        self.rounding = rounding

    def save(self, folder: Path) -> float:
        self._write("save", folder)
        return self.rounding

    def save_adapter(self, folder: Path) -> None:
        self._write("save_adapter", folder)

    def _write(self, call: str, folder: Path) -> None:
        self.calls.append(call)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "new").write_text(call)


@pytest.fixture
def save_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`save_model(storage, lora=…, student_start=…, rounding=…)`: the calls, files of the checkpoint, warnings."""
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer").write_text(""))
    monkeypatch.setattr(worker, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(worker, "copy_generation_config", lambda *_: None)

    def save(
        storage: str, *, lora: Any, student_start: ModelSection = BASE, rounding: float = 0.1
    ) -> tuple[list[str], set[str], tuple[str, ...]]:
        scratch = tmp_path / "scratch"
        study = SimpleNamespace(model=BASE, training=SimpleNamespace(lora=lora, learning_rate=3e-6))
        artifact = Artifact(storage, "checkpoint", "f")
        killed = Path(artifact.path if artifact.is_local else scratch)
        for folder in ("model", "adapter"):  # left by a run that was killed while it saved
            (killed / folder).mkdir(parents=True)
            (killed / folder / "old").write_text("")
        strategy: Any = FakeStrategy(rounding)
        job: Any = SimpleNamespace(study=study, student_start=student_start, checkpoint=artifact)
        session: Any = SimpleNamespace(dist=DistContext(), warn=None)
        warnings = worker.save_model(job, session, strategy, scratch)
        found = artifact.fs.find(artifact.path)
        return strategy.calls, {path.removeprefix(f"{artifact.path}/") for path in found}, warnings

    return save


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_save_model_writes_adapters_by_themselves_too(save_model: Any, tmp_path: Path, scheme: str) -> None:
    calls, files, warnings = save_model(f"{scheme}{tmp_path}/storage", lora=object())
    assert warnings == ()
    assert calls == ["save_adapter", "save"]  # `save` may round the weights
    assert files == {"adapter/new", "model/new", "model/tokenizer"}


@pytest.mark.parametrize(
    ("lora", "student_start"), [(None, BASE), (object(), ModelSection(path="storage/checkpoint-a/model"))]
)
def test_save_model_writes_no_adapter_that_would_not_fit_the_studys_model(
    save_model: Any, tmp_path: Path, lora: Any, student_start: ModelSection
) -> None:
    calls, files, _ = save_model(f"memory://{tmp_path}/storage", lora=lora, student_start=student_start)
    assert calls == ["save"]
    assert files == {"model/new", "model/tokenizer"}


@pytest.mark.parametrize("student_start", [BASE, ModelSection(path="storage/checkpoint-a/model")])
def test_save_model_warns_of_an_update_that_rounding_changed(
    save_model: Any, tmp_path: Path, student_start: ModelSection
) -> None:
    """The adapters of a later round are not written."""
    storage = f"memory://{tmp_path}/storage"
    _, _, warnings = save_model(storage, lora=object(), student_start=student_start, rounding=0.834)
    exact = f"; {storage}/checkpoint-f/adapter has the exact update" if student_start == BASE else ""
    assert warnings == (
        f"training.learning_rate: 3e-06: rounding to bfloat16 changed the adapters' update in the merged model by 83%"
        f"{exact}; a higher rate loses less",
    )
