"""What `make` rejects; nothing is installed here."""

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


def make(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # As typed by a user: under `make test`, make would pass its own flags on and print the folders that it enters.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    return subprocess.run(
        ["make", *words], cwd=clone, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_make_install_does_not_overwrite_a_gpu_environment(clone: Path) -> None:
    done = make(clone, "install")
    assert done.returncode == 2
    assert "error: .venv is for GPUs and older than requirements/cpu.txt; run make install-gpu again\n" in done.stdout


def test_make_install_leaves_an_up_to_date_gpu_environment_alone(clone: Path) -> None:
    (clone / ".venv/.installed").touch()
    assert make(clone, "install").returncode == 0
    assert sorted(path.name for path in (clone / ".venv").iterdir()) == [".for-gpus", ".installed"]


def test_make_clean_keeps_the_results(clone: Path) -> None:
    report = clone / "runs/quickstart/report/index.html"
    report.parent.mkdir(parents=True)
    report.touch()
    assert make(clone, "clean").returncode == 0
    assert report.exists()
    assert not (clone / ".venv").exists()
    assert not (clone / ".uv").exists()


@pytest.fixture
def empty_clone(tmp_path: Path) -> Path:
    """A tree in which nothing is installed."""
    shutil.copy(PROJECT / "Makefile", tmp_path)
    shutil.copytree(PROJECT / "requirements", tmp_path / "requirements")
    return tmp_path


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("python", "setting", "message"),
    [
        (None, "PYTHON=", "error: Python 3.11 was not found; install it, or set PYTHON=/path/to/python3.11\n"),
        ("exit 1", None, " is not Python 3.11; set PYTHON=/path/to/python3.11\n"),
        ('case "$2" in *venv*) exit 1; esac', None, " has no module venv or ensurepip; install it (Debian and Ubuntu"),
        (
            "exit 0",
            "CXX=no-such-compiler",
            "error: no C++ compiler (no-such-compiler) was found; install g++, or set CXX",
        ),
    ],
)
def test_make_install_names_what_is_missing(
    empty_clone: Path, python: str | None, setting: str | None, message: str
) -> None:
    settings = [setting] if setting else []
    if python:
        settings.append(f"PYTHON={write_script(empty_clone / 'python', python)}")
    done = make(empty_clone, "install", *settings)
    assert done.returncode == 2
    assert message in done.stdout
    assert done.stdout.count("\n") == 1
    assert not (empty_clone / ".uv").exists()


def test_make_install_says_what_it_installs(empty_clone: Path) -> None:
    """Before the first installation; a later one changes a few packages and takes seconds."""
    write_script(empty_clone / ".uv/bin/uv", "mkdir -p .venv/bin && touch .venv/bin/python")
    (empty_clone / ".uv/.installed").touch()
    announcement = "Installing the packages of requirements/cpu.txt into .venv: 5 GB, a minute or more, "
    first = make(empty_clone, "install")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(announcement)
    (empty_clone / ".venv/.installed").unlink()
    second = make(empty_clone, "install")
    assert second.returncode == 0, second.stderr
    assert announcement not in second.stdout


def test_make_install_verifies_uv(empty_clone: Path) -> None:
    """The program that installs everything else is installed by the hashes of its files."""
    # Records the arguments of pip; makes an environment whose Python is a copy of itself.
    record = 'case "$2" in venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";; pip) shift 2; echo "$@" > pip.txt;; esac'
    python = write_script(empty_clone / "python", record)
    done = make(empty_clone, ".uv/.installed", f"PYTHON={python}", "CXX=sh")
    assert done.returncode == 0, done.stderr
    words = (empty_clone / "pip.txt").read_text().split()
    assert words[0] == "install"
    assert "--require-hashes" in words
    lock = (empty_clone / words[words.index("--requirement") + 1]).read_text()
    assert lock.startswith("uv==")
    assert lock.count("==") == 1
    assert lock.count("--hash=sha256:") > 10
