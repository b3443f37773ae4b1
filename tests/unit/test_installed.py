import subprocess
import sys

from tests.support.paths import PROJECT


def test_has_pip_leaves_setuptools_importable() -> None:
    """As vLLM imports it, in a notebook after a message that names pip."""
    program = "from pos2distill.installed import has_pip; has_pip(); import setuptools"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PROJECT, timeout=60)
