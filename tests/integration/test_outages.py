"""A full disk, a storage that fails for a minute, a clock that jumps, while a study samples and trains."""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from s3fs import S3FileSystem

from pipelines.commands import run_distill
from pos2distill.config import Recipe
from pos2distill.store.artifacts import DRIVER_FILE
from tests.support.drivers import LIMIT, Driver
from tests.support.results import assert_exactly_once, read_steps, sample_store, saved_states
from tests.support.s3_server import Faulty, s3_server
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


def test_distill_on_a_full_disk_continues_once_there_is_space(
    slow_study: Callable[..., Recipe], small_disk: Path, tmp_path: Path
) -> None:
    full = slow_study(str(small_disk / "run"))
    driver = Driver(tmp_path / "recipe.yaml", small_disk / "run")
    driver.wait_for(lambda: saved_states(full))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(psutil.disk_usage(str(small_disk)).free))
    assert driver.end() == 2, driver.log.read_text()
    # The training worker meets it or, on a slow machine, the lease of the driver.
    assert_one_line(driver, "No space left on device", "free space", "run the same command again")
    filler.unlink()
    driver = Driver(tmp_path / "recipe.yaml", small_disk / "run")
    assert driver.end() == 0, driver.log.read_text()
    assert_exactly_once(full)
    reference = slow_study(str(tmp_path / "reference"), "local", delay_s=0)
    run_distill(reference)
    assert read_steps(full) == read_steps(reference)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """An S3-compatible store, found through the environment."""
    with s3_server() as (url, app):
        for name, value in (
            ("AWS_ENDPOINT_URL", url),
            ("AWS_ACCESS_KEY_ID", "nobody"),
            ("AWS_SECRET_ACCESS_KEY", "nothing"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        S3FileSystem.clear_instance_cache()  # an instance keeps its endpoint
        yield app
        S3FileSystem.clear_instance_cache()


def test_distill_on_a_storage_that_fails_for_a_minute_loses_nothing(
    slow_study: Callable[..., Recipe], server: Faulty, tmp_path: Path
) -> None:
    """Whether the run outlives the minute or ends in one line: the same command ends as if nothing had happened."""
    S3FileSystem().mkdir("bucket")
    remote = slow_study("s3://bucket/run")
    store = sample_store(remote)
    path = tmp_path / "recipe.yaml"

    driver = Driver(path, "s3://bucket/run")
    driver.wait_for(lambda: len(store.part_names()) >= 2)
    parts = set(store.part_names())
    server.is_down = True
    end_of_outage = threading.Timer(60, lambda: setattr(server, "is_down", False))
    end_of_outage.start()
    code = driver.process.wait(LIMIT)
    end_of_outage.join()
    if code:
        assert code == 2, driver.log.read_text()
        assert_one_line(driver, "Service Unavailable", "run the same command again to continue")
        driver = Driver(path, "s3://bucket/run")
        assert driver.end() == 0, driver.log.read_text()
    assert parts <= set(store.part_names())
    assert_exactly_once(remote)
    reference = slow_study(str(tmp_path / "reference"), "local", delay_s=0)
    run_distill(reference)
    assert read_steps(remote) == read_steps(reference)


def test_distill_while_the_clock_jumps_ends_as_if_it_had_not(slow_study: Callable[..., Recipe], tmp_path: Path) -> None:
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
    reference = slow_study(str(tmp_path / "reference"), "local", delay_s=0)
    run_distill(reference)
    assert read_steps(jumping) == read_steps(reference)
