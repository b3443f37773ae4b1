"""Real processes, killed for real."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pos2distill.sampling import reaper

# One process runs them all: each that did would start the parents of all of them.
pytestmark = pytest.mark.xdist_group("reaper")

PROJECT = Path(__file__).parents[3]

# Starts a child before the reaper and two after it: one in a session of its own that has a child itself, one forked.
# Sleeps until the reaper has scanned the processes, then prints all pids: before, child, grandchild, forked, reaper.
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

SHARED_MEMORY_PARENT = """
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

Parent = subprocess.Popen[str]


def alive(pid: int) -> bool:
    table = reaper.read_processes()
    return pid in table and not table[pid].dead


def wait_until(true: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return true()


def start_parent(script: str, *arguments: str) -> Parent:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=PROJECT, stdout=subprocess.PIPE, text=True)


def read_line(parent: Parent) -> list[str]:
    assert parent.stdout is not None
    return parent.stdout.readline().split()


@pytest.fixture(scope="module")
def parents() -> Iterator[dict[str, Parent]]:
    """One parent for each test. All of them start at once, so that their sleeps overlap."""
    started = {name: start_parent(PARENT, name) for name in ("SIGKILL", "SIGTERM", "end", "orphan")}
    started["shared memory"] = start_parent(SHARED_MEMORY_PARENT)
    yield started
    for parent in started.values():
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()  # not read to its end, since a child of a test that has failed may hold it open


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "end"])
def test_start_reaper_kills_later_processes_with_their_parent(parents: dict[str, Parent], how: str) -> None:
    before, *started, helper = map(int, read_line(parents[how]))
    try:
        if how != "end":
            assert all(map(alive, [before, *started, helper]))
            parents[how].send_signal(getattr(signal, how))
        assert wait_until(lambda: not any(map(alive, [*started, helper])))
        assert alive(before)
    finally:
        os.kill(before, signal.SIGKILL)


def test_start_reaper_kills_nothing_while_the_parent_lives(parents: dict[str, Parent]) -> None:
    parent = parents["orphan"]
    before, child, grandchild, *_ = map(int, read_line(parent))
    try:
        os.kill(child, signal.SIGKILL)  # its child, which the reaper already knows, is an orphan now
        time.sleep(1.5)  # three scans
        assert alive(grandchild)
        parent.kill()
        assert wait_until(lambda: not alive(grandchild))
    finally:
        os.kill(before, signal.SIGKILL)


def test_kill_lets_the_resource_tracker_remove_shared_memory(parents: dict[str, Parent]) -> None:
    """Python's own resource tracker is among the descendants of the parent."""
    parent = parents["shared memory"]
    name, child = read_line(parent)
    memory = Path("/dev/shm", name)
    started = reaper.descendants([parent.pid], reaper.read_processes())
    assert len(started) == 3  # the reaper, the tracker, the child
    assert memory.exists()
    parent.kill()
    assert wait_until(lambda: not any(map(alive, started)))
    assert int(child) in started
    assert not memory.exists()


def test_kill_spares_a_later_process_with_the_same_pid() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"]) as process:
        start = reaper.read_processes()[process.pid].start
        reaper.kill({process.pid: start - 1})
        assert process.poll() is None
        reaper.kill({process.pid: start})
        assert process.wait(10) == -signal.SIGKILL


def test_read_processes_of_a_name_with_brackets(tmp_path: Path) -> None:
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "300"]) as process:
        entry = reaper.read_processes()[process.pid]
        assert (entry.parent, entry.dead) == (os.getpid(), False)
        process.kill()
