"""What `pip install .` installs, in an environment of its own, used from another folder."""

import base64
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import pos2distill
from pos2distill.config.read import recipe_names
from pos2distill.models.rope.curves import CONFIG_KEY
from tests.support.paths import PROJECT
from tests.support.served import (
    START_SECONDS,
    TOY,
    VLLM_SERVE,
    assert_same_answers,
    evaluate_toy,
    served,
    settings_of_server,
)

# One group, so that pip installs once however many processes run the tests.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that sees nothing of the checkout and of the tests' settings."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new environment, after `pip install .` in it.

    It takes the packages that the project needs, and hatchling, from the environment of the tests. So nothing is
    downloaded, and pip checks that pyproject.toml names the versions that are installed.
    """
    folder = tmp_path_factory.mktemp("environment")
    done = run(sys.executable, "-m", "venv", folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    # Python 3.11 brings a setuptools that is older than torch needs, and would hide that of the tests.
    done = run(*pip, "uninstall", "--quiet", "--yes", "setuptools", cwd=folder)
    assert done.returncode == 0, done.stderr
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    visible = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "tests_environment.pth").write_text("\n".join(visible) + "\n")
    done = run(*pip, "install", "--quiet", "--no-index", "--no-build-isolation", PROJECT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def test_installed_command_shows_its_version(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "pos2distill", "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"pos2distill {pos2distill.__version__}\n", "")


def test_installed_command_lists_the_recipes(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "pos2distill", "recipes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == recipe_names()


@pytest.mark.parametrize("command", [("pos2distill",), ("python", "-m", "pos2distill")])
@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_r2"])
def test_installed_command_finds_the_toys(
    installed: Path, tmp_path: Path, command: tuple[str, ...], recipe: str
) -> None:
    done = run(installed / command[0], *command[1:], "study", recipe, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"path: {installed.parent}" in done.stdout
    assert "distill" in done.stdout


def test_installed_cluster_presets_are_rendered(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "pos2distill", "cluster", "render", "kind", "quickstart", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kind: RayJob" in done.stdout


@pytest.mark.parametrize("name", ["pipelines", "cluster", "run", "examples", "tests", "scripts", "benchmarks"])
def test_installed_package_adds_no_other_name(installed: Path, tmp_path: Path, name: str) -> None:
    done = run(installed / "python", "-c", f"import {name}", cwd=tmp_path)
    assert f"ModuleNotFoundError: No module named '{name}'" in done.stderr


def test_installed_package_is_imported_from_its_environment(installed: Path, tmp_path: Path) -> None:
    code = (
        "import pos2distill.pipelines.commands as commands, pos2distill; print(pos2distill.__file__, commands.__file__)"
    )
    done = run(installed / "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(installed.parent)) for path in done.stdout.split())


def test_wheel_holds_what_runs_and_nothing_else(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path, cwd=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"pos2distill-{pos2distill.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"pos2distill", f"pos2distill-{pos2distill.__version__}.dist-info"}
    for name in ("py.typed", "__main__.py", "pipelines/recipes/quickstart.yaml", "cluster/presets/kind.yaml"):
        assert f"pos2distill/{name}" in names
    toys = {name.split("/")[3] for name in names if name.startswith("pos2distill/examples/toy/")}
    assert toys == {"base", "two_hop_base", "data.jsonl.gz", "two_hop.jsonl.gz"}
    assert not [name for name in names if "__pycache__" in name]
    assert wheel.stat().st_size < 10 * 2**20


def test_installed_package_evaluates_in_a_script(installed: Path, tmp_path: Path) -> None:
    """In a folder that holds nothing else, with Ray, whose workers import the installed package too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pos2distill\n"
        "settings = {'runtime.executor': 'ray', 'data.eval_examples': 8, 'evaluation.slots': 3,\n"
        "            'evaluation.other_documents': []}\n"
        "evaluation = pos2distill.evaluate('quickstart', settings=settings)\n"
        "evaluation.plot().save('curve.png')\n"
        "print(len(evaluation.to_pandas()), evaluation.curve.slots)\n"
    )
    done = run(installed / "python", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "24 (0, 14, 29)"
    assert (tmp_path / "curve.png").stat().st_size > 1000


CELLS = (
    "import pos2distill",
    "settings = {'runtime.executor': 'local', 'runtime.trainers.strategy': 'torch', 'training.epochs': 1,\n"
    "            'data.train_examples': 8, 'data.eval_examples': 8, 'evaluation.slots': 3,\n"
    "            'evaluation.other_documents': []}\n"
    "result = pos2distill.study('quickstart', settings)",
    "result.plot()",
    "result.to_pandas().groupby('model')['correct'].size()",
)


def test_installed_package_runs_a_study_in_a_notebook(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kernel of the environment's own, in a folder that holds nothing else."""
    kernel = tmp_path / "jupyter" / "kernels" / "installed"
    kernel.mkdir(parents=True)
    command = [str(installed / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "installed", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = tmp_path / "notebook"
    folder.mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(
        notebook, timeout=240, kernel_name="installed", resources={"metadata": {"path": str(folder)}}
    ).execute()
    shown = [cell.outputs[-1].get("data", {}) for cell in notebook.cells[-2:]]
    assert base64.b64decode(shown[0]["image/png"]).startswith(b"\x89PNG")
    assert "after     24" in shown[1]["text/plain"]
    assert (folder / "runs" / "quickstart" / "report" / "index.html").exists()


def with_scales(scales: list[float], folder: Path) -> Path:
    """A copy of the toy whose config.json has these scales."""
    shutil.copytree(TOY, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {CONFIG_KEY: scales}))
    return folder


@pytest.mark.timeout(2 * START_SECONDS)
@pytest.mark.parametrize("carrier", ["config.json", "--hf-overrides"])
def test_vllm_serves_a_model_with_its_scales_once_the_package_is_installed(
    installed: Path, tmp_path: Path, carrier: str
) -> None:
    """vLLM finds the plugin by its entry point: the server's command names nothing else of this project."""
    scales = [1.0, 1.4, 1.8]
    on_transformers = ("model.engine=hf", "runtime.samplers.threads=1")
    plain = evaluate_toy(tmp_path / "plain", *on_transformers)
    scaled = evaluate_toy(
        tmp_path / "by-engine", *on_transformers, "inference.method=lpes", f"inference.scales={scales}"
    )
    # Otherwise a server that ignores scales would pass.
    assert scaled.curve.accuracy_by_slot != plain.curve.accuracy_by_slot
    if carrier == "config.json":
        options = ["--model", str(with_scales(scales, tmp_path / "toy"))]
    else:
        options = ["--model", str(TOY), "--hf-overrides", json.dumps({CONFIG_KEY: scales})]
    command = (*VLLM_SERVE, *options, "--served-model-name", "toy")
    with served(command, tmp_path, python=installed / "python") as base_url:
        assert_same_answers(evaluate_toy(tmp_path / "by-server", *settings_of_server(base_url, "toy")), scaled)
