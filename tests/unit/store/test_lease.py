import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipelines import commands as study
from pos2distill.config import Recipe
from pos2distill.store import lease
from pos2distill.store.artifacts import claim_storage
from pos2distill.store.lease import hold_lease

PERIOD = 0.2


@pytest.fixture
def place(storage: str) -> str:
    claim_storage(storage, "mine")
    return storage


def lease_file(place: str) -> tuple[fsspec.AbstractFileSystem, str]:
    fs, path = fsspec.url_to_fs(f"{place}/driver.json")
    return fs, path


def write(place: str, **changes: Any) -> None:
    """A holder that never renews; by default on another machine."""
    holder = {"owner": "o", "host": "far", "machine": "x", "pid": 7, "since": "noon", "period": PERIOD, "beat": 0}
    fs, path = lease_file(place)
    fs.pipe_file(path, json.dumps(holder | changes).encode())


def test_the_file_says_who_holds_the_storage_and_goes_with_the_holder(place: str) -> None:
    fs, path = lease_file(place)
    with hold_lease(place, period=PERIOD):
        first = json.loads(fs.cat_file(path))
        assert (first["pid"], first["period"], first["beat"]) == (os.getpid(), PERIOD, 0)
        time.sleep(2 * PERIOD)
        assert json.loads(fs.cat_file(path))["beat"] >= 1
    assert not fs.exists(path)
    with pytest.raises(RuntimeError), hold_lease(place, period=PERIOD):
        raise RuntimeError
    assert not fs.exists(path)


def test_a_second_driver_waits_until_the_first_ends(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[str] = []

    def second() -> None:
        with hold_lease(place, period=PERIOD):
            events.append("second")

    waiting = threading.Thread(target=second)
    with hold_lease(place, period=PERIOD):
        since = json.loads(lease_file(place)[0].cat_file(lease_file(place)[1]))["since"]
        waiting.start()
        time.sleep(10 * PERIOD)  # far longer than a dead holder is waited for
        events.append("first")
    waiting.join()
    assert events == ["first", "second"]
    host = lease.socket.gethostname()  # type: ignore[attr-defined]
    assert capsys.readouterr().err == (
        f"{place}: in use by process {os.getpid()} on {host} since {since}; waiting for its end (Ctrl-C to leave)\n"
    )


@pytest.mark.parametrize("dead", [False, True])
def test_of_many_drivers_one_works_at_a_time(place: str, dead: bool) -> None:
    if dead:  # all see it, and take over at once
        write(place, machine=lease._machine(), pid=process_that_is_gone())
    inside: list[int] = []
    most: list[int] = []

    def drive(number: int) -> None:
        with hold_lease(place, period=1.0):
            inside.append(number)
            most.append(len(inside))
            time.sleep(PERIOD)
            inside.remove(number)

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_on_a_disk_a_file_that_came_meanwhile_is_not_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that was paused between its look at a dead holder and the removal, while another one took over."""
    place = str(tmp_path)
    write(place, machine=lease._machine(), pid=process_that_is_gone())
    paused, goes_on, events = threading.Event(), threading.Event(), []
    remove = lease._remove

    def pause(*args: Any) -> None:
        if threading.current_thread().name == "late":
            paused.set()
            assert goes_on.wait(30)
        remove(*args)

    monkeypatch.setattr(lease, "_remove", pause)

    def drive() -> None:
        with hold_lease(place, period=PERIOD):
            events.append("late")

    late = threading.Thread(target=drive, name="late")
    late.start()
    assert paused.wait(30)
    with hold_lease(place, period=PERIOD):
        goes_on.set()
        time.sleep(10 * PERIOD)
        events.append("first")
    late.join()
    assert events == ["first", "late"]


def process_that_is_gone() -> int:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


def test_a_holder_whose_process_is_gone_is_not_waited_for(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, sys\n"
        "from pos2distill.store.lease import hold_lease\n"
        "with hold_lease(sys.argv[1]):\n"
        "    os._exit(1)\n"  # as by SIGKILL: nothing is cleaned up
    )
    if place.startswith("memory"):
        write(place, machine=lease._machine(), pid=process_that_is_gone(), period=1000.0)
    else:
        subprocess.run([sys.executable, "-c", code, place], check=False)
    assert lease_file(place)[0].exists(lease_file(place)[1])
    start = time.monotonic()
    with hold_lease(place, period=PERIOD):
        assert time.monotonic() - start < 5
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("holder", "who"),
    [
        (None, "an unknown process"),
        ({}, "process 7 on far since noon"),
        ({"pid": os.getppid(), "machine": lease._machine()}, f"process {os.getppid()} on far since noon"),
    ],
)
def test_a_silent_holder_is_dead_after_a_while(
    place: str, holder: dict[str, Any] | None, who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place, **(holder or {}))
    if holder is None:
        lease_file(place)[0].pipe_file(lease_file(place)[1], b"")
    start = time.monotonic()
    with hold_lease(place, period=PERIOD):
        assert time.monotonic() - start > 6 * PERIOD
    assert capsys.readouterr().err == f"{place}: in use by {who}; waiting for its end (Ctrl-C to leave)\n"


def test_another_users_process_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not lease._is_gone(lease._Holder("o", "here", lease._machine(), 1, "noon", PERIOD))


def test_without_proc_a_machine_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", refuse)
    assert lease._machine() == lease.socket.gethostname()  # type: ignore[attr-defined]


def test_who_was_taken_over_leaves(place: str) -> None:
    """We were paused for so long that another driver took us for dead."""
    told: queue.Queue[str] = queue.Queue()
    with hold_lease(place, period=PERIOD, leave=told.put):
        write(place)
        line = told.get(timeout=20)
    assert line == f"{place}: another run took over while this one gave no sign of life, so this run stops"
    fs, path = lease_file(place)
    assert json.loads(fs.cat_file(path))["owner"] == "o"  # theirs stays


def test_who_cannot_reach_the_storage_leaves(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise ConnectionError("no route to host")

    told: queue.Queue[str] = queue.Queue()
    start = time.monotonic()
    with hold_lease(place, period=PERIOD, leave=told.put):
        monkeypatch.setattr(lease, "write_bytes", fail)
        line = told.get(timeout=20)
    assert time.monotonic() - start > 6 * PERIOD
    assert line == f"{place}: cannot be reached (no route to host) and another run may take over, so this run stops"


def test_to_leave_is_to_touch_nothing_any_more(tmp_path: Path) -> None:
    """The folder that the work would tidy up is another driver's by now."""
    script = (
        "import sys, time\n"
        "from pos2distill.store.artifacts import Artifact\n"
        "from pos2distill.store.lease import hold_lease\n"
        "artifact = Artifact(sys.argv[1], 'samples', 'f00d')\n"
        "with hold_lease(sys.argv[1], period=0.2), artifact.writing():\n"
        "    open(sys.argv[1] + '/driver.json', 'w').write('{}')\n"
        "    time.sleep(30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path}: another run took over while this one gave no sign of life, so this run stops\n"
    )
    assert (tmp_path / "samples-f00d").is_dir()


def test_a_renewal_that_fails_once_is_no_loss(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []
    works = lease.write_bytes  # type: ignore[attr-defined]

    def fail_once(*arguments: Any) -> None:
        failures.append(1)
        if len(failures) == 1:
            raise ConnectionError("no route to host")
        works(*arguments)

    with hold_lease(place, period=PERIOD):
        monkeypatch.setattr(lease, "write_bytes", fail_once)
        time.sleep(5 * PERIOD)
    assert len(failures) > 2


def test_a_file_that_was_written_although_the_answer_was_lost_is_ours(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store does the conditional PUT, the connection breaks, and the retry is refused."""
    fs, path = lease_file(place)
    create = lease._create

    def twice(*arguments: Any) -> None:
        create(*arguments)
        create(*arguments)

    monkeypatch.setattr(lease, "_create", twice)
    with hold_lease(place, period=PERIOD):
        assert fs.exists(path)


COMMANDS: dict[str, Callable[[Recipe], None]] = {
    "study": study.run_study,
    "evaluate": study.run_evaluate,
    "sample": study.run_sample,
    "distill": study.run_distill,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_make_artifacts_hold_the_storage(
    make_recipe: Callable[..., Recipe], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def reach(*arguments: Any) -> None:
        assert lease_file(recipe.storage)[0].exists(lease_file(recipe.storage)[1])
        raise Reached

    recipe = make_recipe()
    monkeypatch.setattr(study, "_run", reach)
    monkeypatch.setattr(study, "_require", lambda *arguments: None)
    with pytest.raises(Reached):
        COMMANDS[command](recipe)
