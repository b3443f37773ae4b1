"""The Dockerfiles, checked as text: without a container engine."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from cluster.sections import PodsSection

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "cluster" / "docker").glob("*.Dockerfile"))
PODS = PodsSection()


def instructions(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines())]


def last_stage(path: Path) -> list[tuple[str, str]]:
    parsed = instructions(path)
    start = max(index for index, (word, _) in enumerate(parsed) if word == "FROM")
    return parsed[start:]


def locked(name: str) -> str:
    lock = (ROOT / "requirements" / "gpu.txt").read_text()
    found = re.search(rf"^{name}==(\S+)", lock, re.MULTILINE)
    assert found
    return found[1]


def base_images(path: Path) -> dict[str, str]:
    """The images that a build starts from, by argument."""
    pairs = [rest.partition("=") for word, rest in instructions(path) if word == "ARG"]
    return {name: value for name, _, value in pairs if name.endswith("_IMAGE")}


def test_dockerfiles_are_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_dockerfile_copies_only_files_that_exist_and_are_not_ignored(path: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [
        source
        for word, rest in instructions(path)
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert {"pos2distill", "pipelines", "cluster", "examples", "requirements", "run.py", "Makefile"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert source in allowed


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_dockerfile_has_the_folder_user_and_programs_of_the_pods(path: Path) -> None:
    stage = last_stage(path)
    words = dict(instructions(path))
    assert words["WORKDIR"] == PODS.project
    assert stage[-1] == ("USER", str(PODS.user))
    assert any(f"--uid {PODS.user} " in rest for word, rest in stage if word == "RUN")
    assert ("ENV", f"PATH={PODS.project}/.venv/bin:$PATH") in stage
    installed = next(rest for word, rest in instructions(path) if word == "RUN" and "apt-get install" in rest)
    assert {"bash", "g++", "make"} <= set(installed.split())


def test_dockerfile_installs_the_locked_packages_by_a_makefile_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path, target in zip(FILES, ("install", "install-gpu"), strict=True):
        assert ("RUN", f"make {target}") in instructions(path)
        assert target in targets


def test_dockerfile_versions_match_the_locks() -> None:
    python = re.search(r"^LOCK_OPTIONS := .*--python-version (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert python
    for path in FILES:
        _, tag = base_images(path)["PYTHON_IMAGE"].split(":")
        assert tag.startswith(f"{python[1]}-")
    _, tag = base_images(FILES[1])["CUDA_IMAGE"].split(":")
    # The compiler of flash-attn must match the CUDA version that torch was built with.
    assert tag.split(".")[:2] == locked("nvidia-cuda-runtime").split(".")[:2]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_dockerfile_takes_every_base_by_an_argument(path: Path) -> None:
    """So that it can be given by its digest. An argument of FROM must stand before the first one."""
    parsed = instructions(path)
    first = next(index for index, (word, _) in enumerate(parsed) if word == "FROM")
    arguments = {rest.partition("=")[0] for word, rest in parsed[:first] if word == "ARG"}
    stages = {rest.rpartition(" AS ")[2] for word, rest in parsed if word == "FROM" and " AS " in rest}
    bases = [rest.partition(" AS ")[0] for word, rest in parsed if word == "FROM"]
    images = [base for base in bases if base not in stages]
    assert {f"--platform=linux/amd64 ${{{name}}}" for name in arguments} == set(images)
    assert arguments == base_images(path).keys()


def test_gpu_dockerfile_installs_by_the_settings_of_uv(tmp_path: Path) -> None:
    """Without them, uv installs packages that are in no lock: torchvision, torchaudio and torchcodec."""
    command = next(rest for word, rest in instructions(FILES[1]) if word == "RUN" and rest.startswith("sed"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    settings = tomllib.loads((tmp_path / "uv_settings.toml").read_text())
    assert settings == {"tool": {"uv": tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]}}
    copied = FILES[1].read_text().index("COPY --from=settings /opt/pos2distill/uv_settings.toml ./pyproject.toml")
    assert copied < FILES[1].read_text().index("RUN make install-gpu")


def test_gpu_lock_has_a_hash_for_every_package_and_the_trackers() -> None:
    lock = (ROOT / "requirements" / "gpu.txt").read_text()
    packages = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]
    assert len(packages) > 200
    for package in packages:
        assert "--hash=sha256:" in package, package.splitlines()[0]
    for name in ("tensorboard", "wandb", "mlflow-skinny", "s3fs", "gcsfs", "flash-attn"):
        assert locked(name)
    assert not re.search(r"^(torchvision|torchaudio|torchcodec)==", lock, re.MULTILINE)


def test_gpu_build_lock_has_a_hash_for_every_package_and_the_versions_of_the_gpu_lock() -> None:
    """It is installed first, since flash-attn is built against it."""
    text = (ROOT / "requirements" / "gpu_build.txt").read_text()
    packages = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    versions = dict(package.splitlines()[0].removesuffix(" \\").split("==") for package in packages)
    assert {"torch", "setuptools", "wheel", "packaging", "ninja"} <= versions.keys()
    assert all("--hash=sha256:" in package for package in packages)
    for name, version in versions.items():
        assert name == "wheel" or locked(name) == version
    recipe = (ROOT / "Makefile").read_text().partition("\ninstall-gpu:")[2].partition("\n\n")[0]
    installs = [line for line in recipe.splitlines() if " uv pip install " in line or "/uv pip install " in line]
    assert len(installs) == 2
    assert all("--require-hashes" in line for line in installs)


def test_gpu_dockerfile_names_architectures() -> None:
    assert ("ARG", "FLASH_ATTN_CUDA_ARCHS=80;90") in instructions(FILES[1])


def test_dockerignore_excludes_everything_by_default_and_secrets_always() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    assert {"**/.*", "**/*.pem", "**/*secret*", "**/*credential*", "**/*.json", "**/*key.*"} <= set(lines)
