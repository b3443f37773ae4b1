import pytest

from cluster.machines import gpu_count, gpu_memory_gb


@pytest.mark.parametrize(
    ("instance_type", "count", "memory"),
    [
        ("a2-highgpu-8g", 8, 40),
        ("a2-ultragpu-1g", 1, 80),
        ("a3-megagpu-8g", 8, 80),
        ("g2-standard-24", 2, 24),
        ("g5.xlarge", 1, 24),
        ("g6e.48xlarge", 8, 48),
        ("p4d.24xlarge", 8, 40),
        ("p5en.48xlarge", 8, 141),
        ("g5.other", None, 24),  # all sizes of a family have the same GPU
        ("n2-standard-8", None, None),
        ("", None, None),
    ],
)
def test_gpu_count_and_gpu_memory_gb_of_a_machine(instance_type: str, count: int | None, memory: int | None) -> None:
    assert gpu_count(instance_type) == count
    assert gpu_memory_gb(instance_type) == memory
