"""Rights of files that hold for the tests too, where they run as root."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# linux/capability.h: read, write and list whatever the modes of files say.
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


@contextmanager
def respecting_modes() -> Iterator[None]:
    """Within this context, the calling thread may use only what the modes of files allow, even as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = _Header(_VERSION_3, 0), (_Data * 2)()

    def call(function: str) -> None:
        if getattr(libc, function)(ctypes.byref(header), data):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), function)

    call("capget")
    before = data[0].effective
    data[0].effective = before & ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    call("capset")
    try:
        yield
    finally:
        data[0].effective = before
        call("capset")
