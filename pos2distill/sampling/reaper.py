"""No engine process outlives the process that started it, however that one ends; a SIGKILL asks nobody's leave.

A small process of its own looks twice a second at what its parent has started, and kills it once the parent is gone.
It shares no file or pipe with anyone, so that no forked engine can hold it back. Run as a script, without the
site-packages: it imports the standard library only. Linux.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_LOOK_SECONDS = 0.5
_TRIES = 20


@dataclass(frozen=True, slots=True)
class _Process:
    """`start`: in clock ticks since the machine's, which tells a process from a later one of the same number."""

    parent: int
    start: int
    dead: bool


Table = Mapping[int, _Process]


@functools.cache
def start_reaper() -> "subprocess.Popen[bytes]":
    """From now on, what this process starts dies with it. What it has started before is let alone."""
    table, own = _processes(), os.getpid()
    before = json.dumps(sorted(_below([own], table, spared=())))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(own), str(table[own].start), before],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what is sent to the parent's group is not meant for it
    )


def watch(parent: int, start: int, spared: Collection[int]) -> None:
    """Remember the parent's descendants while it lives, then kill them.

    Args:
        start: of the parent. spared: pids that, with all below them, are none of our business.
    """
    started: dict[int, int] = {}
    while True:
        table = _processes()
        alive = parent in table and table[parent].start == start and not table[parent].dead
        roots = [*_living(started, table), parent] if alive else _living(started, table)
        found = {*_below(roots, table, spared), *roots} - {parent, os.getpid()}
        started = {pid: table[pid].start for pid in found}
        if not alive:
            return kill(started)
        time.sleep(_LOOK_SECONDS)


def kill(started: Mapping[int, int]) -> None:
    """Kill processes, given by pid and start, and whatever they start meanwhile; a later process of a pid stays.

    Python's resource tracker has time to remove the shared memory that the others leave; it ends by itself then.
    """
    for attempt in range(_TRIES):
        table = _processes()
        roots = _living(started, table)
        if not roots:
            return
        started = {pid: table[pid].start for pid in {*roots, *_below(roots, table, spared=())}}
        for pid in started:
            if attempt < _TRIES / 2 and _is_tracker(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # it ended by itself, or has become another user's
        time.sleep(_LOOK_SECONDS / 5)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:  # it ended meanwhile
        return False


def _living(started: Mapping[int, int], table: Table) -> list[int]:
    return [pid for pid, start in started.items() if pid in table and table[pid].start == start and not table[pid].dead]


def _below(roots: Iterable[int], table: Table, spared: Collection[int]) -> set[int]:
    """All descendants of the roots, but those spared and what is below them."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), ()) if pid not in found and pid not in spared]
        found.update(new)
        waiting += new
    return found


def _processes() -> dict[int, _Process]:
    """Every process of the machine, or container."""
    table = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path("/proc", entry, "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        # PID (NAME) STATE PARENT …; a name may hold spaces and brackets.
        fields = text.rpartition(")")[2].split()
        table[int(entry)] = _Process(parent=int(fields[1]), start=int(fields[19]), dead=fields[0] in "ZX")
    return table


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), frozenset(json.loads(sys.argv[3])))
