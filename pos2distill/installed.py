"""What is installed beside this project."""

import importlib.metadata


def has_pip() -> bool:
    """Whether this Python has pip.

    Not by `importlib.util.find_spec("pip")`: setuptools (`_distutils_hack`) takes it for a run of pip, after which
    nothing in this process can import setuptools, as vLLM does.
    """
    try:
        importlib.metadata.distribution("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
