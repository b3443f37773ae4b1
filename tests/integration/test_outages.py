"""A full disk, a storage that fails for a minute, a clock that jumps, while a study samples and trains."""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pos2distill.config import Recipe
from pos2distill.store.storage import DRIVER_FILE
from tests.support.drivers import LIMIT_SECONDS, Driver
from tests.support.results import artifact_of, assert_exactly_once, read_steps, sample_store, saved_states
from tests.support.s3_server import FAULTS, Faulty
from tests.support.wall_clock import WallClock

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(900)]

DISK_BYTES = 64 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own in memory, which only the administrator of a machine can mount, or `sudo`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    administrator = ["sudo", "--non-interactive"] if os.geteuid() else []
    options = f"size={DISK_BYTES},uid={os.geteuid()}"
    try:
        mount = subprocess.run(
            [*administrator, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no sudo here")
    if mount.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run([*administrator, "umount", "--lazy", str(folder)], check=True)


def assert_one_line(driver: Driver, *words: str) -> None:
    """The driver has said what is wrong in its last line, and has shown no traceback."""
    log = driver.log.read_text()
    assert "Traceback" not in log, log
    last_line = log.splitlines()[-1]
    assert last_line.startswith("error: "), log
    assert all(word in last_line for word in words), last_line


@contextmanager
def kept_full(folder: Path) -> Iterator[None]:
    """A file takes every free byte of a disk, also what other processes free, until the end."""
    is_over = threading.Event()

    def fill() -> None:
        with (folder / "filler").open("ab", buffering=0) as filler:
            while not is_over.wait(0.02):
                with suppress(OSError):
                    while True:
                        filler.write(bytes(1 << 16))

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        (folder / "filler").unlink()


def test_distill_on_a_full_disk_continues_once_there_is_space(
    slow_study: Callable[..., Recipe], undisturbed_steps: list[dict[str, Any]], small_disk: Path, tmp_path: Path
) -> None:
    full = slow_study(str(small_disk / "run"))
    driver = Driver(tmp_path / "recipe.yaml", small_disk / "run")
    driver.wait_for(lambda: saved_states(full))
    with kept_full(small_disk):
        assert driver.end() == 2, driver.log.read_text()
    # The training worker meets it or, on a slow machine, the lease of the driver.
    assert_one_line(driver, "No space left on device", "free space", "run the same command again")
    driver = Driver(tmp_path / "recipe.yaml", small_disk / "run")
    assert driver.end() == 0, driver.log.read_text()
    assert_exactly_once(full)
    assert read_steps(full) == undisturbed_steps


def test_distill_on_s3_that_fails_for_a_minute_loses_and_repeats_nothing(
    slow_study: Callable[..., Recipe],
    undisturbed_steps: list[dict[str, Any]],
    faulty: Faulty,
    bucket: str,
    tmp_path: Path,
) -> None:
    """Ray's workers write samples, checkpoints and steps, and find the endpoint through the environment alone.

    Some requests fail, and during a minute all. Whether the run outlives it or ends in one line: the same command ends
    as if nothing had happened.
    """
    storage = f"{bucket}/run"
    remote = slow_study(storage)
    store = sample_store(remote)
    path = tmp_path / "recipe.yaml"

    driver = Driver(path, storage)
    driver.wait_for(lambda: len(store.part_names()) >= 2)
    parts = set(store.part_names())
    faulty.is_down = True
    end_of_outage = threading.Timer(60, lambda: setattr(faulty, "is_down", False))
    end_of_outage.start()
    code = driver.process.wait(LIMIT_SECONDS)
    end_of_outage.join()
    if code:
        assert code == 2, driver.log.read_text()
        assert_one_line(driver, "Service Unavailable", "run the same command again to continue")
        driver = Driver(path, storage)
        assert driver.end() == 0, driver.log.read_text()
    assert all(faulty.requests[fault] for fault in FAULTS), faulty.requests
    assert parts <= set(store.part_names())
    assert_exactly_once(remote)
    checkpoint = artifact_of(remote, "distill")
    assert checkpoint.fs.exists(f"{checkpoint.path}/model/model.safetensors")
    assert not checkpoint.fs.exists(f"{checkpoint.path}/training")
    assert read_steps(remote) == undisturbed_steps


def test_distill_while_the_clock_jumps_ends_as_if_it_had_not(
    slow_study: Callable[..., Recipe], undisturbed_steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Of the driver, of all processes of Ray, and of a second driver that waits for the storage: by days, twice."""
    clock = WallClock(tmp_path)
    jumping = slow_study(str(tmp_path / "jumping"))
    path, environment = tmp_path / "recipe.yaml", {**os.environ, **clock.variables}
    first = Driver(path, jumping.storage, environment)
    first.wait_for((Path(jumping.storage) / DRIVER_FILE).exists)
    # Now, since a busy machine may take as long to start it as the first one takes from its first samples to its end.
    second = Driver(path, jumping.storage, environment)
    second.wait_for(lambda: "waiting until it ends" in second.log.read_text())
    first.wait_for(lambda: len(sample_store(jumping).part_names()) >= 2)
    clock.jump(2 * 24 * 3600)
    first.wait_for(lambda: saved_states(jumping))
    clock.jump(-24 * 3600)
    logs = []
    for driver in (first, second):
        assert driver.end() == 0, driver.log.read_text()
        logs.append(driver.log.read_text())
    assert re.search(r"^distill +cached", logs[0], re.MULTILINE) is None
    assert re.search(r"^distill +cached", logs[1], re.MULTILINE)
    assert_exactly_once(jumping)
    assert read_steps(jumping) == undisturbed_steps
