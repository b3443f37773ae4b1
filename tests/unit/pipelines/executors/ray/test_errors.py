import errno
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train.v2.api.exceptions import ControllerError

from pipelines.executors.ray.errors import actor_died, find_corrupt_part, find_fault, find_user_error
from pipelines.executors.ray.messages import DriverMailbox, _Mailbox
from pos2distill.errors import CorruptPart, MachineError, TransientError, UserError


def test_find_user_error_follows_every_kind_of_link() -> None:
    inner_error = UserError("the file is gone")
    explicit = RuntimeError("a")
    explicit.__cause__ = inner_error
    implicit = RuntimeError("b")
    implicit.__context__ = explicit
    remote = RuntimeError("c")
    remote.cause = implicit  # type: ignore[attr-defined]
    workers = RuntimeError("d")
    workers.worker_failures = {0: ValueError("other"), 1: remote}  # type: ignore[attr-defined]
    assert [find_user_error(each) for each in (inner_error, explicit, implicit, remote, workers)] == [inner_error] * 5


def test_find_user_error_is_the_plain_one() -> None:
    """What `ray.get` raises is a user error too, whose message is a traceback."""
    inner = MachineError("example fox-1: the engine gave no answer")
    raised = RayTaskError("call", "the traceback", inner).as_instanceof_cause()
    assert isinstance(raised, MachineError)
    assert find_user_error(raised) is inner


def test_actor_died_follows_types_and_text() -> None:
    wrapped = RuntimeError("a")
    wrapped.__cause__ = ActorDiedError()
    assert actor_died(wrapped)
    assert actor_died(RuntimeError("ray.exceptions.ActorDiedError: The actor died unexpectedly"))
    assert not actor_died(RuntimeError("b"))


def test_errors_of_the_controller_are_found() -> None:
    """Its own message is that of the error, without the class."""
    inner = TransientError("s3://b: cannot be used (Service Unavailable)")
    assert find_user_error(ControllerError(inner)) is inner
    fault = find_fault(ControllerError(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")))
    assert isinstance(fault, TransientError)


def test_find_corrupt_part_is_no_user_error() -> None:
    """Restarted workers sample its examples again; it is reported only when no restart is left."""
    corrupt = CorruptPart("part-1: corrupt")
    workers = RuntimeError("a")
    workers.worker_failures = {1: corrupt}  # type: ignore[attr-defined]
    assert find_corrupt_part(workers) is corrupt
    assert find_user_error(workers) is None
    assert find_corrupt_part(RuntimeError("b")) is None


def test_find_user_error_ends_on_cycles_and_ignores_bugs() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert find_user_error(first) is None


def test_find_user_error_reads_the_text_of_a_traceback() -> None:
    """Ray Data drops the cause and keeps its text."""
    text = "ray::f()\n  File x\npos2distill.errors.UserError: line 3: 'gold' is missing\n\nThe above exception was"
    found = find_user_error(RuntimeError(text))
    assert str(found) == "line 3: 'gold' is missing"
    assert not isinstance(found, TransientError)
    passing = find_user_error(RuntimeError("f()\npos2distill.errors.TransientError: s3://b: cannot be used\n"))
    assert isinstance(passing, TransientError)
    assert str(passing) == "s3://b: cannot be used"
    machine = find_user_error(RuntimeError("f()\npos2distill.errors.MachineError: vLLM could not start\n"))
    assert isinstance(machine, MachineError)
    assert str(machine) == "vLLM could not start"
    assert find_user_error(RuntimeError("SomeError: pos2distill.errors.UserError: quoted")) is None


def test_find_user_error_reports_a_full_disk_of_any_process() -> None:
    """Also where Ray Data keeps the text alone; and a library in Rust has no OSError."""
    remote = RuntimeError("task failed")
    remote.cause = OSError(28, "No space left on device")  # type: ignore[attr-defined]
    text = RuntimeError("ray::f()\nSafetensorError: I/O error: No space left on device (os error 28)")
    for error in (remote, text):
        found = find_user_error(error)
        assert isinstance(found, MachineError)
        assert "a worker cannot write: No space left on device; free space in runtime.storage" in str(found)


def test_find_fault_says_that_a_node_ran_low_on_memory() -> None:
    text = (
        "Training failed due to controller error:\n9 worker(s) were killed due to the node running low on memory. "
        "Memory on the node (IP: 10.0.0.2, ID: 3c8f) was 22.63GB used / 23.54GB limit (0.96)\nOOM kill reason: Memory"
    )
    found = find_fault(RuntimeError(text))
    assert isinstance(found, MachineError)
    assert str(found) == (
        "a node ran low on memory (22.63GB of 23.54GB used), so Ray ended workers there; give it more, or lower "
        "runtime.samplers.max, runtime.teachers.batch_size or runtime.trainers.micro_batch_tokens; run the same "
        "command again to continue"
    )


def test_find_fault_follows_what_ray_wrapped_alone() -> None:
    fault = PermissionError(13, "Permission denied", "/x")
    remote = RuntimeError("a")
    remote.cause = fault  # type: ignore[attr-defined]
    workers = RuntimeError("b")
    workers.worker_failures = {0: ValueError("other"), 1: remote}  # type: ignore[attr-defined]
    for error in (fault, remote, workers):
        found = find_fault(error)
        assert type(found) is MachineError
        assert str(found).startswith("/x: Permission denied; check the permissions")
    bug = KeyError("x")
    bug.__context__ = fault  # raised while the fault was handled
    assert find_fault(bug) is None


def test_find_fault_tells_what_may_pass() -> None:
    """As s3fs raises it of a storage that is overloaded: the same command, or a job's next attempt, may succeed."""
    found = find_fault(OSError(errno.EBUSY, "Service Unavailable"))
    assert isinstance(found, TransientError)
    assert str(found) == (
        "a storage: Service Unavailable; the storage is overloaded or down; run the same command again to continue; "
        "POS2DISTILL_DEBUG=1 shows the traceback"
    )
    broken_image = find_fault(OSError("libcudart.so: cannot open shared object file"))
    assert type(broken_image) is MachineError
    assert str(broken_image).startswith("OSError: libcudart.so: cannot open")


def test_an_actor_that_ended_too_often_is_named_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it reported no reason, since it was killed."""
    monkeypatch.setattr("ray.get", lambda *_, **__: [])
    with pytest.raises(MachineError) as caught, DriverMailbox(Mock()).shown():
        raise ActorDiedError
    assert str(caught.value) == (
        "a process of runtime.samplers, teachers or trainers ended more often than its max_restarts allows, or the one "
        "that counts the run's progress ended: its machine was lost, or its memory did not suffice; run the same "
        "command again to continue"
    )


def test_an_error_that_an_actor_raised_while_it_was_created_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.get", lambda *_, **__: [])
    raised = RuntimeError("no kernel image is available")
    created = ActorDiedError(RayTaskError("load", "RuntimeError: no kernel image is available", raised))
    for error in (created, ValueError(str(created))):  # Ray Data keeps the text alone
        with pytest.raises(type(error), match="no kernel image"), DriverMailbox(Mock()).shown():
            raise error


def test_the_same_warning_of_several_processes_is_shown_once_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("pipelines.executors.ray.messages.time.monotonic", lambda: now)
    mailbox = _Mailbox()
    for line in ("s3://b: no answer", "s3://b: no answer", "another"):
        mailbox.add_warning(line)
    assert mailbox.take_warnings() == ["s3://b: no answer", "another"]
    for now in (50.0, 100.0):  # noqa: B007  # read by the clock
        mailbox.add_warning("another")
    assert mailbox.take_warnings() == ["another"]


def test_deaths_of_engines_count_if_they_are_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an older one the engine was started again, and work went on."""
    now = 0.0
    monkeypatch.setattr("pipelines.executors.ray.messages.time.monotonic", lambda: now)
    mailbox = _Mailbox()
    assert mailbox.recent_deaths(120) == []
    mailbox.add_death("a")
    now = 1000.0
    assert mailbox.recent_deaths(120) == []
    mailbox.add_death("b")
    now = 1100.0
    assert mailbox.recent_deaths(120) == ["a", "b"]
