"""A wall clock that a test sets, for processes of their own: a library that the dynamic linker loads before libc.

Only the wall clock changes (CLOCK_REALTIME, `time`, `gettimeofday`), as when somebody sets the clock of a machine. The
monotonic clock keeps running.
"""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Shared with the test. To read the file at each call would be too slow for Ray. */
static volatile int64_t *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("WALL_CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) offset_s = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long result = syscall(SYS_clock_gettime, clock, now);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (result == 0 && is_wall && offset_s) now->tv_sec += *offset_s;
    return (int)result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


class WallClock:
    """The clock of the processes that run with `variables`. `jump` sets it, also while they run."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler")
        source, library = folder / "wall_clock.c", folder / "wall_clock.so"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        self._offset = folder / "wall_clock.offset"
        self.jump(0)
        self.variables = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """Set the clock to the right time and so many seconds."""
        # In place, since the processes have this file mapped.
        with open(self._offset, "r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))
