"""What `make` refuses; nothing is installed here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A tree whose uv is installed, with an environment for GPUs that is older than the lock files."""
    shutil.copy(PROJECT / "Makefile", tmp_path)
    shutil.copytree(PROJECT / "requirements", tmp_path / "requirements")
    for name in (".uv/.installed", ".venv/.for-gpus", ".venv/.installed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    os.utime(tmp_path / ".venv/.installed", (0, 0))
    return tmp_path


def make(clone: Path, target: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", target], cwd=clone, capture_output=True, text=True, check=False)


def test_an_environment_for_gpus_is_not_made_one_for_cpus(clone: Path) -> None:
    done = make(clone, "install")
    assert done.returncode == 2
    assert "error: .venv is for GPUs and older than requirements/cpu.txt; run make install-gpu again\n" in done.stdout


def test_an_environment_for_gpus_that_is_up_to_date_is_left_alone(clone: Path) -> None:
    (clone / ".venv/.installed").touch()
    assert make(clone, "install").returncode == 0
    assert sorted(path.name for path in (clone / ".venv").iterdir()) == [".for-gpus", ".installed"]
