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
# Prints all pids: before, child, grandchild, forked, reaper. Ends once its input does.
PARENT = """
import os, subprocess, sys, time
from pos2distill.sampling import reaper
from pos2distill.sampling.reaper import start_reaper
reaper.__file__ = sys.argv[1]
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
print(before.pid, child.pid, grandchild, forked, helper.pid, flush=True)
sys.stdin.read()
"""

SHARED_MEMORY_PARENT = """
import sys, time
from multiprocessing import get_context, shared_memory
from pos2distill.sampling import reaper
reaper.__file__ = sys.argv[1]
reaper.start_reaper()
memory = shared_memory.SharedMemory(create=True, size=1000)
process = get_context("spawn").Process(target=time.sleep, args=(300,))
process.start()
print(memory.name, process.pid, flush=True)
time.sleep(300)
"""


# The script of a reaper that appends a byte to a file whenever it begins to scan.
LOGGED_REAPER = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("reaper", {script!r})
reaper = importlib.util.module_from_spec(spec)
sys.modules["reaper"] = reaper
spec.loader.exec_module(reaper)
scan = reaper.read_processes
def read_processes():
    with open({log!r}, "ab") as log:
        log.write(b".")
    return scan()
reaper.read_processes = read_processes
reaper.watch(int(sys.argv[1]), int(sys.argv[2]), frozenset(json.loads(sys.argv[3])))
"""


def alive(pid: int) -> bool:
    table = reaper.read_processes()
    return pid in table and not table[pid].dead


def wait_until(true: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return true()


class Parent:
    """A process that starts a reaper, which appends a byte to `log` whenever it begins to scan."""

    def __init__(self, script: str, log: Path) -> None:
        self.log = log
        log.touch()
        logged = log.with_suffix(".py")
        logged.write_text(LOGGED_REAPER.format(script=reaper.__file__, log=str(log)))
        command = [sys.executable, "-c", script, str(logged)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=PROJECT, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdin
        assert self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout

    def read_line(self) -> list[str]:
        return self.output.readline().split()

    def wait_for_scans(self, count: int) -> None:
        """Wait until so many scans have ended that have begun after this call."""
        # A scan has ended when the next one begins.
        enough = self.log.stat().st_size + count + 1
        assert wait_until(lambda: self.log.stat().st_size >= enough)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.input.close()
        self.output.close()  # not read to its end, since a child of a test that has failed may hold it open


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Parent]]:
    """One parent for each test. All of them start at once, which takes as long as one."""
    folder = tmp_path_factory.mktemp("scans")
    started = {name: Parent(PARENT, folder / name) for name in ("SIGKILL", "SIGTERM", "end", "orphan")}
    started["shared memory"] = Parent(SHARED_MEMORY_PARENT, folder / "shared-memory")
    yield started
    for parent in started.values():
        parent.close()


def test_read_processes_takes_names_that_are_no_text() -> None:
    """Linux cuts them to 15 bytes, also inside a character."""
    rename = "open('/proc/self/comm', 'wb').write(b'name \\xc3'); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-S", "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        assert reaper.read_processes()[process.pid].parent == os.getpid()
        process.communicate(b"\n")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "end"])
def test_start_reaper_kills_later_processes_with_their_parent(parents: dict[str, Parent], how: str) -> None:
    parent = parents[how]
    before, *started, helper = map(int, parent.read_line())
    try:
        parent.wait_for_scans(1)
        assert all(map(alive, [before, *started, helper]))
        if how == "end":
            parent.input.close()
        else:
            parent.process.send_signal(getattr(signal, how))
        assert wait_until(lambda: not any(map(alive, [*started, helper])))
        assert alive(before)
    finally:
        os.kill(before, signal.SIGKILL)


def test_start_reaper_kills_nothing_while_the_parent_lives(parents: dict[str, Parent]) -> None:
    parent = parents["orphan"]
    before, child, grandchild, *_ = map(int, parent.read_line())
    try:
        parent.wait_for_scans(1)
        os.kill(child, signal.SIGKILL)  # its child, which the reaper already knows, is an orphan now
        parent.wait_for_scans(2)
        assert alive(grandchild)
        parent.process.kill()
        assert wait_until(lambda: not alive(grandchild))
    finally:
        os.kill(before, signal.SIGKILL)


def test_kill_lets_the_resource_tracker_remove_shared_memory(parents: dict[str, Parent]) -> None:
    """Python's own resource tracker is among the descendants of the parent."""
    parent = parents["shared memory"]
    name, child = parent.read_line()
    parent.wait_for_scans(1)
    memory = Path("/dev/shm", name)
    started = reaper.descendants([parent.process.pid], reaper.read_processes())
    assert len(started) == 3  # the reaper, the tracker, the child
    assert memory.exists()
    parent.process.kill()
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
