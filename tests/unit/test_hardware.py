import re
import subprocess
import sys
from pathlib import Path

import pytest

from pos2distill import hardware
from pos2distill.config.load import load_recipe
from pos2distill.hardware import (
    available_cpus,
    cpu_is_faster_in_bfloat16,
    describe_hardware,
    local_cpus,
    peak_memory_gib,
    release_gpu_memory,
    torch_has_gpu,
    visible_gpus,
)


def make_cpu_info(folder: Path, line: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    return path


@pytest.mark.parametrize(
    ("machine", "line", "expected"),
    [
        ("x86_64", "flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_fp16", False),
        ("x86_64", "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f avx512_bf16", True),
        ("x86_64", "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f", False),
        ("x86_64", "flags\t\t: fpu avx2 amx_tile amx_bf16", True),
        ("x86_64", "flags\t\t: fpu avx2 avx512f", False),
        ("aarch64", "Features\t: fp asimd bf16 i8mm", True),
        ("aarch64", "Features\t: fp asimd", False),
        ("x86_64", "bugs\t\t: amx_bf16", False),
    ],
)
def test_cpu_is_faster_in_bfloat16_reads_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, line: str, expected: bool
) -> None:
    monkeypatch.setattr("pos2distill.hardware.platform.machine", lambda: machine)
    assert cpu_is_faster_in_bfloat16(make_cpu_info(tmp_path, line)) is expected


def test_describe_hardware_names_the_processor_and_its_vector_instructions(tmp_path: Path) -> None:
    path = make_cpu_info(tmp_path, "model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512f avx512_bf16 rtm")
    expected = r"AMD EPYC \(avx2 avx512f avx512_bf16\), \d+ cores, \d+ GiB(, .+)*"
    assert re.fullmatch(expected, describe_hardware(path))


def test_describe_hardware_without_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pos2distill.hardware.platform.machine", lambda: "arm64")
    assert re.match(r"arm64, \d+ cores, \d+ GiB", describe_hardware(tmp_path / "missing"))


def test_cpu_is_faster_in_bfloat16_without_linux(tmp_path: Path) -> None:
    assert not cpu_is_faster_in_bfloat16(tmp_path / "missing")


@pytest.mark.parametrize(("supported", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_precision_is_resolved_when_a_recipe_is_loaded(
    monkeypatch: pytest.MonkeyPatch, supported: bool, expected: str
) -> None:
    monkeypatch.setattr("pos2distill.config.base.cpu_is_faster_in_bfloat16", lambda: supported)
    auto = load_recipe("quickstart", ["model.dtype=auto", "training.precision=auto"])
    explicit = load_recipe("quickstart", [f"model.dtype={expected}", f"training.precision={expected}"])
    assert (auto.study.model.dtype, auto.study.training.precision) == (expected, expected)
    # So their fingerprints are equal too.
    assert auto.study == explicit.study


@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,1,2", 2), ("0,-1,1", 1)]
)
def test_visible_gpus_counts_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps", "tty0"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus(tmp_path) == expected


@pytest.mark.parametrize(("counted", "has_gpu"), [(1, True), (0, False)])
def test_torch_has_gpu_asks_torch_in_wsl2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int, has_gpu: bool
) -> None:
    """It has one device file for all GPUs of Windows."""
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(hardware, "visible_gpus", lambda: visible_gpus(tmp_path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: counted)
    assert hardware.visible_gpus() == counted
    assert torch_has_gpu() is has_gpu


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 96),
        ({"cpu.max": "max 100000\n"}, 96),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "5000 100000\n"}, 1),
        ({"cpu.max": "20000000 100000\n"}, 96),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 96),
        ({"cpu/cpu.cfs_quota_us": "350000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_available_cpus_respects_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(96)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cpus(tmp_path) == expected


@pytest.mark.parametrize(("available", "expected"), [(1, 6), (96, 96)])
def test_local_cpus_are_at_least_six(monkeypatch: pytest.MonkeyPatch, available: int, expected: int) -> None:
    monkeypatch.setattr(hardware, "available_cpus", lambda: available)
    assert local_cpus() == expected


def test_peak_memory_gib_stays_after_memory_is_freed() -> None:
    """Of the process itself: it is not that of the process which started it."""
    code = """
from pos2distill.hardware import peak_memory_gib
before = peak_memory_gib("cpu")
block = b"1" * (300 << 20)
during = peak_memory_gib("cpu")
del block
print(before, during, peak_memory_gib("cpu"))
"""
    large = b"1" * (600 << 20)
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert len(large) == 600 << 20
    before, during, after = map(float, output.split())
    assert before < 0.5
    assert during - before == pytest.approx(300 / 1024, abs=0.03)
    assert after == pytest.approx(during, abs=0.03)


@pytest.mark.parametrize(("initialized", "calls"), [(False, 0), (True, 1)])
def test_release_gpu_memory_starts_no_cuda(monkeypatch: pytest.MonkeyPatch, initialized: bool, calls: int) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: initialized)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(True))
    release_gpu_memory()
    assert len(emptied) == calls


def test_release_gpu_memory_imports_no_torch() -> None:
    code = """
import sys
from pos2distill.hardware import release_gpu_memory
release_gpu_memory()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("status", [None, "Name:\tpython\nno colon\n"])
def test_peak_memory_gib_of_systems_that_do_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    expected = peak_memory_gib("cpu")
    monkeypatch.setattr(hardware, "_OWN_STATUS", tmp_path / "status")
    if status is not None:
        (tmp_path / "status").write_text(status)
    # Not less, since the process that started this one may have had more.
    assert 0.9 * expected < peak_memory_gib("cpu") < 30
