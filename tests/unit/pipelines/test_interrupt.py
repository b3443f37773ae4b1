import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.interrupt import interruptible

ENDS_BEFORE_ITS_WORK = """
import signal, time
from pipelines.interrupt import interruptible
def fail(number, frame):
    raise TimeoutError
signal.signal(signal.SIGALRM, fail)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    interruptible(lambda: time.sleep(60), lambda: None)
except TimeoutError:
    print("ends")
"""
LEAVES_AT_ONCE = """
import os, signal, sys, time
from pipelines.interrupt import interruptible
from pos2distill.startup import mark_as_cli_process
def work():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    os.kill(os.getpid(), int(sys.argv[2]))
    time.sleep(60)
if sys.argv[1] == "program":
    mark_as_cli_process()
before = signal.getsignal(signal.SIGTERM)
try:
    interruptible(work, lambda: time.sleep(60))
except KeyboardInterrupt as error:
    print(type(error).__name__, signal.getsignal(signal.SIGTERM) is before)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruptible_requests_a_stop_and_waits(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    asked = threading.Event()

    def work() -> str:
        os.kill(os.getpid(), number)
        assert asked.wait(10)
        return "done in good order"

    before = signal.getsignal(number)
    assert interruptible(work, asked.set) == ("done in good order", number)
    assert signal.getsignal(number) is before
    assert "saving a checkpoint; press Ctrl-C again to force quit" in capsys.readouterr().err


def test_interruptible_returns_the_result_without_a_signal() -> None:
    assert interruptible(lambda: 42, lambda: None) == (42, 0)


def test_interruptible_raises_errors_of_the_work() -> None:
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0, lambda: None)


@pytest.mark.parametrize(
    ("process", "number", "code", "printed"),
    [
        ("program", signal.SIGTERM, 143, ""),
        ("notebook", signal.SIGINT, 0, "KeyboardInterrupt True\n"),
        ("notebook", signal.SIGTERM, 0, "Terminated True\n"),
    ],
)
def test_interruptible_quits_at_the_second_signal(process: str, number: int, code: int, printed: str) -> None:
    """The program ends. Another process continues, whatever the work and the request to stop do."""
    command = [sys.executable, "-c", LEAVES_AT_ONCE, process, str(int(number))]
    ended = subprocess.run(command, timeout=30, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, printed)


def test_interruptible_outside_the_main_thread_sets_no_handler_and_starts_no_thread() -> None:
    """Python sets handlers in the main thread only."""

    def work() -> tuple[object, int]:
        return signal.getsignal(signal.SIGINT), threading.active_count()

    with ThreadPoolExecutor(1) as pool:
        result, number = pool.submit(interruptible, work, lambda: None).result()
        assert result == (signal.getsignal(signal.SIGINT), threading.active_count())
        assert number == 0
        with pytest.raises(ZeroDivisionError):
            pool.submit(interruptible, lambda: 1 // 0, lambda: None).result()


def test_interruptible_keeps_no_process_alive() -> None:
    """Its main thread ends by an exception while `work` is under way."""
    command = [sys.executable, "-c", ENDS_BEFORE_ITS_WORK]
    assert subprocess.run(command, timeout=30, check=True, capture_output=True, text=True).stdout == "ends\n"
