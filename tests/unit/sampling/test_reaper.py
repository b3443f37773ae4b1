"""Real processes, killed for real."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pos2distill.sampling import reaper

PROJECT = Path(__file__).parents[3]

# Starts a child before the reaper and two after it: one in a session of its own that has a child itself, one forked.
# Then tells all pids: before, child, grandchild, forked, reaper.
PARENT = """
import os, subprocess, sys, time
from pos2distill.sampling.reaper import start_reaper
sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
nested = "import subprocess, sys, time; print(subprocess.Popen({sleeper}).pid, flush=True); time.sleep(300)"
before = subprocess.Popen(sleeper)
helper = start_reaper()
assert start_reaper() is helper
child = subprocess.Popen([sys.executable, "-S", "-c", nested.format(sleeper=sleeper)],
                         start_new_session=True, stdout=subprocess.PIPE)
grandchild = int(child.stdout.readline())
if not (forked := os.fork()):
    time.sleep(300)
    os._exit(0)
time.sleep(2)
print(before.pid, child.pid, grandchild, forked, helper.pid, flush=True)
if sys.argv[1:] == ["end"]:
    sys.exit()
time.sleep(300)
"""


def alive(pid: int) -> bool:
    table = reaper._processes()
    return pid in table and not table[pid].dead


def wait_until(true: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return true()


Start = Callable[..., tuple[subprocess.Popen[str], list[int]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(*arguments)`: the parent above and the pids it tells. The child from before the reaper is ended here."""
    parents: list[tuple[subprocess.Popen[str], list[int]]] = []

    def run(*arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, *arguments], cwd=PROJECT, stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parents.append((parent, pids))
        return parents[-1]

    yield run
    for parent, pids in parents:
        parent.kill()
        if pids and alive(pids[0]):
            os.kill(pids[0], signal.SIGKILL)
        parent.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "end"])
def test_what_a_process_started_dies_with_it(start: Start, how: Any) -> None:
    parent, (before, *started, helper) = start(*(["end"] if how == "end" else []))
    if how != "end":
        assert all(map(alive, [before, *started, helper]))
        parent.send_signal(how)
    assert wait_until(lambda: not any(map(alive, [*started, helper])))
    assert alive(before)


def test_it_waits_while_the_parent_lives(start: Start) -> None:
    parent, (_, child, grandchild, *_) = start()
    os.kill(child, signal.SIGKILL)  # its own child is an orphan now, and known all the same
    time.sleep(1.5)
    assert alive(grandchild)
    parent.kill()
    assert wait_until(lambda: not alive(grandchild))


SHARING = """
import time
from multiprocessing import get_context, shared_memory
from pos2distill.sampling.reaper import start_reaper
start_reaper()
memory = shared_memory.SharedMemory(create=True, size=1000)
process = get_context("spawn").Process(target=time.sleep, args=(300,))
process.start()
time.sleep(2)
print(memory.name, process.pid, flush=True)
time.sleep(300)
"""


def test_shared_memory_is_removed(tmp_path: Path) -> None:
    """By Python's own resource tracker, which is among the processes below the parent."""
    with subprocess.Popen([sys.executable, "-c", SHARING], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        name, child = parent.stdout.readline().split()
        memory = Path("/dev/shm", name)
        started = reaper._below([parent.pid], reaper._processes(), ())
        assert len(started) == 3  # the reaper, the tracker, the child
        assert memory.exists()
        parent.kill()
    assert wait_until(lambda: not any(map(alive, started)))
    assert int(child) in started
    assert not memory.exists()


def test_a_later_process_of_the_same_pid_is_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"]) as process:
        begun = reaper._processes()[process.pid].start
        reaper.kill({process.pid: begun - 1})
        assert process.poll() is None
        reaper.kill({process.pid: begun})
        assert process.wait(10) == -signal.SIGKILL


def test_names_with_brackets_are_read(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "300"]) as process:
        entry = reaper._processes()[process.pid]
        assert (entry.parent, entry.dead) == (os.getpid(), False)
        process.kill()
