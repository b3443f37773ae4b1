"""Ctrl-C before the command line runs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelines.cli import command_line, recipes
from pos2distill import startup
from pos2distill.startup import is_interrupt, mark_as_cli_process, silent_interrupts
from tests.support.paths import PROJECT

# Sends the signal when a package is about to be imported, and prints that it did.
INTERRUPTED_AT = """
import importlib.abc, os, runpy, signal, sys, time

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == PACKAGE:
            print("importing", name, flush=True)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["run.py", *ARGUMENTS]
runpy.run_path("run.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("pipelines", ["--help"]),
        ("pydantic", ["--help"]),
        ("pipelines.cli.command_line", ["--help"]),
        ("numpy", ["study", "quickstart"]),
        ("pyarrow", ["study", "quickstart"]),
        ("numpy", ["study", "quickstart", "--dry-run"]),
        ("cluster.command", ["cluster", "render", "kind"]),
        ("ray", ["submit", "quickstart", "--address", "http://127.0.0.1:9"]),
    ],
)
def test_interrupted_imports_end_without_a_word(package: str, arguments: list[str]) -> None:
    assert interrupted_at(package, arguments) == (130, f"importing {package}\n", "")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_interrupted_imports_of_a_check_end_as_an_interrupted_command(package: str, tmp_path: Path) -> None:
    # In a storage of its own: where the quickstart has finished, nothing is checked.
    code, _, said = interrupted_at(package, ["study", "quickstart", f"runtime.storage={tmp_path}"])
    assert (code, said) == (130, "interrupted; run the same command again to continue\n")


def interrupted_at(package: str, arguments: list[str]) -> tuple[int, str, str]:
    """Exit code and output of a command that is interrupted when it imports the package."""
    code = INTERRUPTED_AT.replace("PACKAGE", repr(package)).replace("ARGUMENTS", repr(arguments))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1, 0.3])
def test_an_interrupt_after_a_delay_ends_in_one_line_at_most(delay: float) -> None:
    """Counted from the first import of the command line: before it, Python itself is starting.

    A dry run that gets to the import of NumPy waits there, so that it does not end before the interrupt.
    """
    waiting = "pass\n        while name == 'numpy':\n            time.sleep(0.01)"
    code = INTERRUPTED_AT.replace("os.kill(os.getpid(), signal.SIGINT)", waiting)
    code = code.replace("PACKAGE", "'pipelines'").replace("ARGUMENTS", "['study', 'quickstart', '--dry-run']")
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing pipelines\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert len(said.splitlines()) <= 1


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the program."""
    monkeypatch.setattr(startup, "_cli_process", None)
    mark_as_cli_process()


@pytest.mark.usefixtures("program")
def test_silent_interrupts_restores_the_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    with silent_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ImportError), silent_interrupts():
        raise ImportError
    assert signal.getsignal(signal.SIGINT) is before


def test_silent_interrupts_changes_nothing_in_a_process_that_is_not_the_program() -> None:
    before = signal.getsignal(signal.SIGINT)
    with silent_interrupts():
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_imports_leaves_a_process_that_calls_main_alive() -> None:
    code = INTERRUPTED_AT.replace("PACKAGE", "'numpy'").partition("sys.argv")[0]
    code += "from pipelines.cli.command_line import main\nprint(main(['study', 'quickstart']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "importing numpy\n130\n")
    assert done.stderr == "interrupted; run the same command again to continue\n"


@pytest.mark.usefixtures("program")
def test_silent_interrupts_leaves_other_handlers_and_threads_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with silent_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    entered = []

    def work() -> None:
        with silent_interrupts():
            entered.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [before]


def test_is_interrupt_knows_the_panic_of_an_extension() -> None:
    panic = type("PanicException", (BaseException,), {})
    assert is_interrupt(panic("called on an `Err` value: PyErr { type: <class 'KeyboardInterrupt'>, value: () }"))
    assert not is_interrupt(panic("index out of bounds"))
    assert not is_interrupt(ValueError("KeyboardInterrupt"))


def test_a_panic_of_ctrl_c_ends_the_command_line_as_ctrl_c_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    panic = type("PanicException", (BaseException,), {})

    def run(*_: object) -> int:
        raise panic("PyErr { type: <class 'KeyboardInterrupt'> }")

    monkeypatch.setattr(recipes, "_run", run)
    assert command_line.main(["recipes"]) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to continue\n"


def test_a_python_without_the_packages_is_named_in_one_line() -> None:
    """`-S`: without site-packages, as a Python outside the checkout's environment."""
    done = subprocess.run(
        [sys.executable, "-S", "run.py", "recipes"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {sys.executable}: the package pydantic is not installed; in a checkout run `make install`, then "
        f".venv/bin/python run.py\n"
    )
