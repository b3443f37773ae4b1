import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.interrupt import interruptible

ENDS_BEFORE_ITS_WORK = """
import time
from pipelines.interrupt import _start
_start(lambda: time.sleep(60))
"""
LEAVES_AT_ONCE = """
import os, signal, time
from pipelines.interrupt import interruptible
def work():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
interruptible(work, lambda: None)
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


def test_interruptible_quits_at_the_second_signal() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES_AT_ONCE], timeout=30, check=False, capture_output=True)
    assert ended.returncode == 128 + signal.SIGTERM


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
    """Whose main thread has ended, for example by an exception, while `work` was under way."""
    subprocess.run([sys.executable, "-c", ENDS_BEFORE_ITS_WORK], timeout=30, check=True)
