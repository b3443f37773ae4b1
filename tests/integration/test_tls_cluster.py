"""A Ray cluster whose connections are encrypted (RAY_USE_TLS), found through RAY_ADDRESS."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ray._private.services import get_node_ip_address

from pos2distill.config import Recipe
from tests.support.drivers import Driver
from tests.support.heads import ray_head
from tests.support.results import counts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("faults"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]


def make_certificate(folder: Path) -> dict[str, str]:
    """A certificate of this machine that signs itself, and the variables by which Ray finds it."""
    key, certificate = folder / "tls.key", folder / "tls.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            # Ray connects by this address also to a head on loopback.
            *("-addext", f"subjectAltName=DNS:localhost,IP:127.0.0.1,IP:{get_node_ip_address()}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_CA_CERT": str(certificate),
    }


def test_sample_runs_on_a_cluster_with_tls(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe(model={"engine": "fake"})
    variables = {
        **make_certificate(tmp_path),
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with ray_head(["--num-cpus=6", "--object-store-memory=120000000"], variables=variables) as head:
        environment = {**head.environment, "RAY_ADDRESS": head.address}
        driver = Driver(tmp_path / "recipe.yaml", Path(recipe.storage), environment, command="sample")
        assert driver.end() == 0, driver.log.read_text()
    assert counts_of(recipe, "sample")["sampled"] == recipe.study.data.train_examples
