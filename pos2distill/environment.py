"""The environment variables that this project sets for its libraries, and why.

Each function is called explicitly, before the library that reads the variables is imported or started. Importing this
module sets nothing.
"""

import os


def set_vllm_variables(*, device: str, threads: int, cpu_kv_cache_gib: int) -> None:
    """Set what vLLM reads when it is imported and when its engine process starts (vLLM 0.32).

    Args:
        threads: of the engine's process, on a CPU.
        cpu_kv_cache_gib: memory of the KV cache, on a CPU.
    """
    # No usage report is sent to vLLM's developers, unless the user sets the variable otherwise.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device != "cpu":
        return
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cpu_kv_cache_gib)
    # By default the CPU build binds its threads to cores that it selects itself. Several actors on one machine would
    # select the same cores, so binding is off and the number of threads is that of the pool's settings.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(threads)
