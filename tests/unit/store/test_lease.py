import contextlib
import errno
import functools
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pos2distill.errors import TransientError
from pos2distill.store import files, lease
from pos2distill.store.files import write_bytes
from pos2distill.store.lease_file import create, machine_id, remove
from pos2distill.store.storage import claim_storage
from tests.support.wall_clock import WallClock

PERIOD = 0.05  # for holders that do not renew
LIVE_PERIOD = 0.5  # for holders that renew: on a busy machine a renewal, which waits for the disk, may take long
STEADY_PERIOD = 1.0  # for holders that must never be taken for dead, however busy the machine is

MISSED_PERIODS = 6
hold_lease = functools.partial(lease.hold_lease, missed_periods=MISSED_PERIODS)

AGAIN = "run the same command again to continue"


@pytest.fixture
def claimed(storage: str) -> str:
    claim_storage(storage, "mine")
    return storage


def lease_file(storage: str) -> tuple[fsspec.AbstractFileSystem, str]:
    fs, path = fsspec.url_to_fs(f"{storage}/driver.json")
    return fs, path


def write_holder(storage: str, **changes: Any) -> None:
    """A holder that never renews; by default on another machine."""
    holder = {"owner": "o", "host": "far", "machine": "x", "pid": 7, "since": "noon", "beat": 0}
    holder |= {"period": PERIOD, "missed_periods": MISSED_PERIODS}
    fs, path = lease_file(storage)
    fs.pipe_file(path, json.dumps(holder | changes).encode())


def beat_of(storage: str) -> int:
    """How often the holder has renewed its lease."""
    fs, path = lease_file(storage)
    return int(json.loads(fs.cat_file(path))["beat"])


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_hold_lease_writes_renews_and_removes_the_file(claimed: str) -> None:
    fs, path = lease_file(claimed)
    with hold_lease(claimed, period=LIVE_PERIOD):
        first = json.loads(fs.cat_file(path))
        assert (first["pid"], first["period"], first["beat"]) == (os.getpid(), LIVE_PERIOD, 0)
        wait_for(lambda: beat_of(claimed) >= 1)
    assert not fs.exists(path)
    with pytest.raises(RuntimeError), hold_lease(claimed, period=LIVE_PERIOD):
        raise RuntimeError
    assert not fs.exists(path)


def test_hold_lease_lets_a_storage_be_silent_for_five_minutes(claimed: str) -> None:
    fs, path = lease_file(claimed)
    with lease.hold_lease(claimed):
        holder = json.loads(fs.cat_file(path))
    assert holder["period"] * holder["missed_periods"] == 300


def test_hold_lease_waits_until_the_holder_ends(claimed: str, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[str] = []

    def second() -> None:
        with hold_lease(claimed, period=LIVE_PERIOD):
            events.append("second")

    waiting = threading.Thread(target=second)
    with hold_lease(claimed, period=STEADY_PERIOD):
        fs, path = lease_file(claimed)
        since = json.loads(fs.cat_file(path))["since"]
        waiting.start()
        # A holder that does not renew is dead after 6 periods.
        wait_for(lambda: beat_of(claimed) > MISSED_PERIODS, seconds=60)
        events.append("first")
    waiting.join()
    assert events == ["first", "second"]
    host = socket.gethostname()
    who = f"process {os.getpid()} on {host} since {since}"
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"{re.escape(claimed)}: in use by {re.escape(who)}; waiting until it ends, or does not renew its lease for "
        r"[\d.]+ s \(Ctrl-C to cancel\)",
        line,
    )


def test_hold_lease_waits_while_some_requests_fail(claimed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that waits for hours outlives a storage that does not answer for a moment."""
    read = files.read_if_any
    failures = iter([True, False, True, True])

    def read_or_fail(fs: Any, path: str) -> bytes | None:
        fails = next(failures, False) if answered else False
        if fails:
            failed.append(path)
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        answered.append(path)
        return read(fs, path)

    answered: list[str] = []
    failed: list[str] = []
    write_holder(claimed)
    monkeypatch.setattr(lease, "read_if_any", read_or_fail)
    with hold_lease(claimed, period=LIVE_PERIOD):
        assert len(failed) == 3
    # Whether the storage works at all is not known before the first answer.
    monkeypatch.setattr(lease, "read_if_any", functools.partial(fail_to_read, ConnectionResetError))
    with pytest.raises(ConnectionResetError), hold_lease(claimed, period=LIVE_PERIOD):
        pass


def fail_to_read(kind: type[OSError], fs: Any, path: str) -> bytes | None:
    raise kind(path)


@pytest.mark.parametrize("kind", [ConnectionResetError, PermissionError])
def test_hold_lease_stops_waiting_for_a_storage_that_stays_silent_or_refuses(
    claimed: str, monkeypatch: pytest.MonkeyPatch, kind: type[OSError]
) -> None:
    read = files.read_if_any
    calls: list[float] = []

    def read_once(fs: Any, path: str) -> bytes | None:
        calls.append(time.monotonic())
        return read(fs, path) if len(calls) == 1 else fail_to_read(kind, fs, path)

    write_holder(claimed, period=STEADY_PERIOD)
    monkeypatch.setattr(lease, "read_if_any", read_once)
    with pytest.raises(kind), hold_lease(claimed, period=PERIOD):
        pass
    if kind is PermissionError:
        assert len(calls) == 2
    else:
        assert calls[-1] - calls[0] > MISSED_PERIODS * PERIOD / 2


def test_hold_lease_stops_waiting_for_a_storage_that_it_can_only_read(
    claimed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_create(*_: Any) -> None:
        attempts.append(time.monotonic())
        raise OSError(errno.EIO, "Input/output error")

    attempts: list[float] = []
    write_holder(claimed, machine=machine_id(), pid=pid_of_ended_process())
    monkeypatch.setattr(lease, "create", fail_to_create)
    with pytest.raises(OSError, match="Input/output"), hold_lease(claimed, period=PERIOD):
        pass
    assert len(attempts) > 2


@pytest.mark.parametrize("dead", [False, True])
def test_hold_lease_admits_one_of_many_drivers_at_a_time(claimed: str, dead: bool) -> None:
    if dead:  # all of them find a dead holder at the same time
        write_holder(claimed, machine=machine_id(), pid=pid_of_ended_process())
    inside: list[int] = []
    most: list[int] = []

    def drive(number: int) -> None:
        with hold_lease(claimed, period=1.0):
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


def test_remove_keeps_a_file_that_replaced_the_dead_holders_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver is paused between reading a dead holder's file and removing it, while another one takes over."""
    storage = str(tmp_path)
    write_holder(storage, machine=machine_id(), pid=pid_of_ended_process())
    paused, resumed, removed = threading.Event(), threading.Event(), threading.Event()
    events: list[str] = []
    read = files.read_if_any
    reads_of_late: list[str] = []

    def count_and_read(fs: Any, path: str) -> bytes | None:
        if threading.current_thread().name == "late":
            reads_of_late.append(path)
        return read(fs, path)

    def pause_then_remove(*args: Any) -> None:
        if threading.current_thread().name == "late":
            paused.set()
            assert resumed.wait(30)
        remove(*args)
        if threading.current_thread().name == "late":
            removed.set()

    monkeypatch.setattr(lease, "read_if_any", count_and_read)
    monkeypatch.setattr(lease, "remove", pause_then_remove)

    def drive() -> None:
        with hold_lease(storage, period=STEADY_PERIOD):
            events.append("late")

    late = threading.Thread(target=drive, name="late")
    late.start()
    assert paused.wait(30)
    with hold_lease(storage, period=STEADY_PERIOD):
        resumed.set()
        assert removed.wait(30)
        # A driver that finds no file creates its own at once, and then reads it only once more.
        before = len(reads_of_late)
        wait_for(lambda: len(reads_of_late) >= before + 3)
        events.append("first")
    late.join()
    assert events == ["first", "late"]


def pid_of_ended_process() -> int:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return ended.pid


def test_hold_lease_does_not_wait_for_a_process_that_ended(claimed: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, sys\n"
        "from pos2distill.store.lease import hold_lease\n"
        "with hold_lease(sys.argv[1]):\n"
        "    os._exit(1)\n"  # as after SIGKILL, nothing is cleaned up
    )
    if claimed.startswith("memory"):
        write_holder(claimed, machine=machine_id(), pid=pid_of_ended_process(), period=1000.0)
    else:
        subprocess.run([sys.executable, "-c", code, claimed], check=False)
    assert lease_file(claimed)[0].exists(lease_file(claimed)[1])
    start = time.monotonic()
    with hold_lease(claimed, period=PERIOD):
        assert time.monotonic() - start < 5
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("holder", "who"),
    [
        (None, "an unknown process"),
        ({}, "process 7 on far since noon"),
        ({"pid": os.getppid(), "machine": machine_id()}, f"process {os.getppid()} on far since noon"),
    ],
)
def test_hold_lease_takes_over_from_a_holder_that_does_not_renew(
    claimed: str, holder: dict[str, Any] | None, who: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_holder(claimed, **(holder or {}))
    if holder is None:
        fs, path = lease_file(claimed)
        fs.pipe_file(path, b"")
    start = time.monotonic()
    with hold_lease(claimed, period=PERIOD):
        assert time.monotonic() - start > 5 * PERIOD
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"{re.escape(claimed)}: in use by {re.escape(who)}; waiting until it ends, or does not renew its lease for "
        r"[\d.]+ s \(Ctrl-C to cancel\)",
        line,
    )


def test_hold_lease_waits_for_another_users_process(claimed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may not be signaled, and so exists."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    write_holder(claimed, machine=machine_id(), pid=1)
    start = time.monotonic()
    with hold_lease(claimed, period=PERIOD):
        assert time.monotonic() - start > 5 * PERIOD


def test_hold_lease_names_the_host_where_there_is_no_proc(claimed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", refuse)
    fs, path = lease_file(claimed)
    with hold_lease(claimed, period=LIVE_PERIOD):
        assert json.loads(fs.cat_file(path))["machine"] == socket.gethostname()


def test_hold_lease_reports_that_another_run_took_over(claimed: str) -> None:
    """This driver was paused for so long that another one took it for dead."""
    lost: queue.Queue[str] = queue.Queue()
    with hold_lease(claimed, period=LIVE_PERIOD, on_lost=lost.put):
        write_holder(claimed)
        line = lost.get(timeout=20)
    assert line == f"{claimed}: another run took over because this one did not renew its lease; this run stops; {AGAIN}"
    fs, path = lease_file(claimed)
    assert json.loads(fs.cat_file(path))["owner"] == "o"  # the other run's file is kept


def test_hold_lease_reports_that_another_run_took_over_while_it_was_reading(
    claimed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused between reading its own file and renewing it; the other run's file must stay."""
    read, lost = files.read_if_any, queue.Queue[str]()
    renewing = threading.Event()

    def read_then_pause(fs: Any, path: str) -> bytes | None:
        data = read(fs, path)
        if renewing.is_set():
            renewing.clear()
            write_holder(claimed)
            time.sleep(1.5 * LIVE_PERIOD)
        return data

    monkeypatch.setattr(lease, "read_if_any", read_then_pause)
    with hold_lease(claimed, period=LIVE_PERIOD, on_lost=lost.put):
        renewing.set()
        assert "another run took over" in lost.get(timeout=20)
    fs, path = lease_file(claimed)
    assert json.loads(fs.cat_file(path))["owner"] == "o"


def test_hold_lease_reports_a_storage_that_cannot_be_reached(claimed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise ConnectionError("no route to host")

    lost: queue.Queue[str] = queue.Queue()
    start = time.monotonic()
    with hold_lease(claimed, period=LIVE_PERIOD, on_lost=lost.put):
        monkeypatch.setattr(lease, "write_bytes", fail)
        line = lost.get(timeout=20)
    assert time.monotonic() - start > 5 * LIVE_PERIOD
    reason = "the lease cannot be renewed (no route to host), so another run may take over; check the network"
    assert line == f"{claimed}: {reason}; this run stops; {AGAIN}"


def test_hold_lease_reports_a_storage_that_says_nothing(claimed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before another run may take over, although the request has not ended. The body's end does not wait for it."""
    answers = threading.Event()
    lost: queue.Queue[str] = queue.Queue()
    start = time.monotonic()
    with hold_lease(claimed, period=LIVE_PERIOD, on_lost=lost.put):
        monkeypatch.setattr(lease, "write_bytes", lambda *_: answers.wait(60))
        line = lost.get(timeout=20)
        noticed = time.monotonic() - start
    ended = time.monotonic() - start
    answers.set()
    assert noticed > 5 * LIVE_PERIOD
    assert ended - noticed < 5
    assert line == (
        f"{claimed}: the lease cannot be renewed (no answer), so another run may take over; this run stops; {AGAIN}"
    )
    assert lost.empty()


@pytest.mark.parametrize("outcome", [None, KeyboardInterrupt])
def test_hold_lease_keeps_the_outcome_of_its_body_if_the_storage_is_gone(
    claimed: str, monkeypatch: pytest.MonkeyPatch, outcome: type[BaseException] | None
) -> None:
    def fail(*arguments: Any) -> None:
        raise ConnectionError("no route to host")

    with pytest.raises(KeyboardInterrupt) if outcome else contextlib.nullcontext(), hold_lease(claimed):
        monkeypatch.setattr(lease, "read_if_any", fail)
        if outcome:
            raise outcome


def test_hold_lease_makes_the_folder_that_the_driver_before_it_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = tmp_path / "storage"
    claim_storage(str(storage), "mine")
    write_holder(str(storage), period=STEADY_PERIOD)
    held = threading.Event()

    def wait_and_hold() -> None:
        with hold_lease(str(storage), period=STEADY_PERIOD):
            held.set()

    waiting = threading.Thread(target=wait_and_hold)
    waiting.start()
    printed: list[str] = []

    def says_that_it_waits() -> bool:
        printed.append(capsys.readouterr().err)
        return "waiting until it ends" in "".join(printed)

    wait_for(says_that_it_waits)
    shutil.rmtree(storage)
    assert held.wait(20)
    waiting.join()


def test_hold_lease_reports_a_full_disk(claimed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    lost: queue.Queue[str] = queue.Queue()
    with hold_lease(claimed, period=LIVE_PERIOD, on_lost=lost.put):
        monkeypatch.setattr(lease, "write_bytes", fail)
        line = lost.get(timeout=20)
    assert "(No space left on device), so another run may take over; free space there" in line
    assert line.endswith(f"; this run stops; {AGAIN}")


def test_exit_immediately_cleans_nothing_up(tmp_path: Path) -> None:
    """The folder that `writing` would remove belongs to another driver by now."""
    script = (
        "import sys, time\n"
        "from pos2distill.store.artifacts import Artifact\n"
        "from pos2distill.store.lease import exit_immediately, hold_lease\n"
        "artifact = Artifact(sys.argv[1], 'samples', 'f00d')\n"
        "with hold_lease(sys.argv[1], period=0.2, on_lost=exit_immediately), artifact.writing():\n"
        "    open(sys.argv[1] + '/driver.json', 'w').write('{}')\n"
        "    time.sleep(30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path}: another run took over because this one did not renew its lease; this run stops; {AGAIN}\n"
    )
    assert (tmp_path / "samples-f00d").is_dir()


def test_hold_lease_tells_a_process_that_outlives_it(claimed: str) -> None:
    reported: queue.Queue[TransientError] = queue.Queue()
    line = f"{claimed}: another run took over because this one did not renew its lease; this run stops; {AGAIN}"

    def fail(_: TransientError) -> None:
        raise ConnectionError("a cluster that is gone")

    with hold_lease(claimed, period=LIVE_PERIOD) as held, held.notify_on_loss(fail), held.notify_on_loss(reported.put):
        held.check()
        write_holder(claimed)
        assert str(reported.get(timeout=20)) == line
        with pytest.raises(TransientError) as caught:
            held.check()
        assert str(caught.value) == line
        with pytest.raises(TransientError), held.notify_on_loss(reported.put):
            raise AssertionError("the lease was lost before")


def test_hold_lease_reports_to_nobody_after_their_work(claimed: str) -> None:
    reported: queue.Queue[TransientError] = queue.Queue()
    with hold_lease(claimed, period=LIVE_PERIOD) as held:
        with held.notify_on_loss(reported.put):
            pass
        held.mark_lost("lost")
    assert reported.empty()


def test_hold_lease_is_kept_until_the_work_ends_that_its_body_left_behind(claimed: str) -> None:
    fs, path = lease_file(claimed)
    started, ends = threading.Event(), threading.Event()

    def work(held: lease.Lease) -> None:
        with held.hold_during():
            started.set()
            assert ends.wait(30)

    with hold_lease(claimed, period=LIVE_PERIOD) as held:
        threading.Thread(target=work, args=[held]).start()
        assert started.wait(30)
    assert fs.exists(path)
    wait_for(lambda: beat_of(claimed) >= 1)  # it is renewed
    ends.set()
    wait_for(lambda: not fs.exists(path))


HOLD = (
    "import sys, time\n"
    "from pos2distill.store.lease import hold_lease\n"
    "print(round(time.time()), flush=True)\n"
    "with hold_lease(sys.argv[1], period=float(sys.argv[2]), missed_periods=6):\n"
    "    print('holds', flush=True)\n"
    "    for line in sys.stdin:\n"
    "        print(round(time.time()), flush=True)\n"
)
DAY = 24 * 3600


class Process:
    """A driver of its own that holds the lease until its input ends. It prints the time for every line."""

    def __init__(self, storage: Path, period: float, clock: WallClock) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(storage), str(period)],
            env={**os.environ, **clock.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin
        assert self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout

    def line(self) -> str:
        return self.output.readline().strip()

    def time(self) -> int:
        """On its wall clock."""
        self.input.write("\n")
        self.input.flush()
        return int(self.line())


def test_hold_lease_keeps_a_holder_whose_clock_jumps(tmp_path: Path) -> None:
    """By a day in both directions, on its own machine and on that of the driver that waits."""
    clock = WallClock(tmp_path)
    holder = Process(tmp_path, STEADY_PERIOD, clock)
    before = int(holder.line())
    assert holder.line() == "holds"
    waiting = Process(tmp_path, STEADY_PERIOD, clock)
    waiting.line()
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: lines.put(waiting.line()), daemon=True).start()
    for jump in (DAY, -DAY, 0):
        clock.jump(jump)
        assert abs(holder.time() - before - jump) < 600  # the clock does jump
        with pytest.raises(queue.Empty):
            lines.get(timeout=3 * STEADY_PERIOD)  # both look at their clocks five times a period
    holder.input.close()
    assert lines.get(timeout=20) == "holds"
    assert holder.process.wait(20) == 0
    waiting.input.close()
    assert waiting.process.wait(20) == 0


def test_hold_lease_keeps_a_holder_that_was_paused(tmp_path: Path) -> None:
    """As Ctrl-Z and `fg` do: nobody else wanted the lease."""
    holder = Process(tmp_path, LIVE_PERIOD, WallClock(tmp_path))
    holder.line()
    assert holder.line() == "holds"
    holder.process.send_signal(signal.SIGSTOP)
    time.sleep(8 * LIVE_PERIOD)  # longer than a holder may be silent
    before = beat_of(str(tmp_path))
    holder.process.send_signal(signal.SIGCONT)
    wait_for(lambda: beat_of(str(tmp_path)) >= before + 4)
    holder.input.close()
    assert holder.process.wait(20) == 0


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_hold_lease_takes_over_from_a_dead_holder_although_the_clock_jumps(tmp_path: Path, jump: int) -> None:
    """The holder died on another machine, so that only its silence shows it."""
    clock = WallClock(tmp_path)
    write_holder(str(tmp_path), period=STEADY_PERIOD)
    waiting = Process(tmp_path, STEADY_PERIOD, clock)
    start = time.monotonic()
    waiting.line()
    time.sleep(2 * STEADY_PERIOD)
    clock.jump(jump)
    assert waiting.line() == "holds"
    assert time.monotonic() - start > 4 * STEADY_PERIOD  # it has waited
    waiting.input.close()
    assert waiting.process.wait(20) == 0


def test_hold_lease_survives_a_renewal_that_fails(claimed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def fail_once(*arguments: Any) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise ConnectionError("no route to host")
        write_bytes(*arguments)

    with hold_lease(claimed, period=LIVE_PERIOD):
        monkeypatch.setattr(lease, "write_bytes", fail_once)
        wait_for(lambda: len(attempts) > 2)


def test_hold_lease_accepts_its_own_file_after_a_refused_retry(claimed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store performs the conditional PUT, the connection breaks, and the retry is refused."""
    fs, path = lease_file(claimed)

    def create_twice(*arguments: Any) -> None:
        create(*arguments)
        create(*arguments)

    monkeypatch.setattr(lease, "create", create_twice)
    with hold_lease(claimed, period=PERIOD):
        assert fs.exists(path)


def test_create_leaves_no_file_that_it_could_not_write(tmp_path: Path) -> None:
    """On a full disk: an empty file would be another driver's, for which this one would wait."""
    path = tmp_path / "folder" / "driver.json"
    program = (
        "import fsspec, resource, signal, sys\n"
        "from pos2distill.store.lease_file import create\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n"
        "    create(fsspec.filesystem('file'), sys.argv[1], b'me')\n"
        "except OSError as error:\n"
        "    raise SystemExit(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], check=False, timeout=60)
    assert done.returncode == errno.EFBIG
    assert not path.exists()


@pytest.mark.parametrize("error", [FileExistsError, OSError(errno.EINVAL, "no"), OSError(errno.EIO, "Conflict")])
def test_create_leaves_a_file_that_another_driver_created(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError] | OSError
) -> None:
    """Stores tell it in different ways. Without such a file, the error is one."""
    path = f"/{uuid.uuid4().hex}/driver.json"
    fs = fsspec.filesystem("memory")

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(fs, "pipe_file", refuse)
    if error is not FileExistsError:
        with pytest.raises(OSError, match=r"no|Conflict"):
            create(fs, path, b"me")
    with fs.open(path, "wb") as file:
        file.write(b"other")
    create(fs, path, b"me")
    assert fs.cat_file(path) == b"other"
