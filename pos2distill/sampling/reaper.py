"""Kills the engine's processes when the process that started them ends in any way, SIGKILL included.

A small separate process scans /proc twice a second, remembers the descendants of its parent, and kills them once the
parent is gone. It shares no file or pipe with other processes, because an engine process that inherited such a pipe
would keep it open. It runs as a script without site-packages, since it needs the standard library only. Linux.

Why not Ray: Ray 2.60 can kill a worker's descendants after the worker crashed
(`RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper`, off by default; `RAY_process_group_cleanup_enabled`
misses processes in a session of their own; docs.ray.io, "Lifetimes of a User-Spawn Process"). The raylet does this, so
it does not cover
- an engine in a process that is not a Ray worker (a notebook, a script, a test);
- a raylet that is itself killed by SIGKILL;
- a cluster whose nodes were started without the variable, which a driver cannot set afterwards.
An engine process that survives keeps all its GPU memory, and the next engine on that GPU fails to start.
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

_SCAN_INTERVAL_SECONDS = 0.5
_KILL_INTERVAL_SECONDS = 0.1
_KILL_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class _Process:
    """An entry of /proc.

    Attributes:
        parent: its pid.
        start: clock ticks from boot to the process's start; a later process with the same pid has a later start.
        dead: it has ended, but its parent has not waited for it yet.
    """

    parent: int
    start: int
    dead: bool


ProcessTable = Mapping[int, _Process]  # by pid


@functools.cache
def start_reaper() -> "subprocess.Popen[bytes]":
    """Kill all processes that this process starts from now on, when it ends. Earlier ones are not touched."""
    table = read_processes()
    own_pid = os.getpid()
    earlier = json.dumps(sorted(descendants([own_pid], table)))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(own_pid), str(table[own_pid].start), earlier],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the parent's process group must not end the reaper
    )


def watch(parent: int, start: int, ignored: Collection[int]) -> None:
    """Remember the parent's descendants while it lives, then kill them.

    A descendant is remembered even if the process between it and the parent ends.

    Args:
        parent: pid of the parent.
        start: start of the parent, as in `_Process`.
        ignored: pids of processes that are not killed. Their descendants are not killed either.
    """
    known: dict[int, int] = {}  # start by pid
    while True:
        table = read_processes()
        parent_lives = parent in table and table[parent].start == start and not table[parent].dead
        roots = _living(known, table)
        if parent_lives:
            roots.append(parent)
        found = {*roots, *descendants(roots, table, ignored)} - {parent, os.getpid()}
        # Rebuilt in each scan, so that processes that have ended are forgotten.
        known = {pid: table[pid].start for pid in found}
        if not parent_lives:
            kill(known)
            return
        time.sleep(_SCAN_INTERVAL_SECONDS)


def kill(started: Mapping[int, int]) -> None:
    """Kill processes and the descendants that they start in the meantime.

    The resource tracker of Python's multiprocessing is killed last: it ends by itself after it has removed the shared
    memory that the other processes left.

    Args:
        started: start by pid. A later process with the same pid is not killed.
    """
    # More than once, because a process can start another one between the scan and the signal.
    for attempt in range(_KILL_ATTEMPTS):
        table = read_processes()
        roots = _living(started, table)
        if not roots:
            return
        started = {pid: table[pid].start for pid in {*roots, *descendants(roots, table)}}
        for pid in started:
            if attempt < _KILL_ATTEMPTS / 2 and _is_resource_tracker(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # it ended, or its pid now belongs to another user's process
        time.sleep(_KILL_INTERVAL_SECONDS)


def read_processes() -> dict[int, _Process]:
    """Every process of this machine, or container, by pid."""
    table = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # The kernel cuts names to 15 bytes, also inside a character.
            stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process ended after the listing
            continue
        # proc(5): PID (NAME) STATE PARENT ... START, where NAME may contain spaces and brackets.
        fields = stat.rpartition(")")[2].split()
        table[int(entry)] = _Process(parent=int(fields[1]), start=int(fields[19]), dead=fields[0] in "ZX")
    return table


def descendants(roots: Iterable[int], table: ProcessTable, ignored: Collection[int] = ()) -> set[int]:
    """All descendants of the roots, without the ignored ones and their descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    pending = list(roots)
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in found and child not in ignored:
                found.add(child)
                pending.append(child)
    return found


def _living(started: Mapping[int, int], table: ProcessTable) -> list[int]:
    """The pids that still belong to the process that was started, if it has not ended."""
    living = []
    for pid, start in started.items():
        if pid in table and table[pid].start == start and not table[pid].dead:
            living.append(pid)
    return living


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:  # the process ended
        return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), frozenset(json.loads(sys.argv[3])))
