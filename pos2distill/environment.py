"""The environment variables that this project sets for its libraries, and why.

Each function that sets some is called explicitly, before the library that reads them is imported or started. Importing
this module sets nothing.
"""

import os


def set_vllm_variables(*, device: str, threads: int, cpu_kv_cache_gib: int) -> None:
    """Set what vLLM reads when it is imported and when its engine process starts (vLLM 0.32).

    Args:
        threads: threads of the engine's process, on a CPU.
        cpu_kv_cache_gib: memory of the KV cache, on a CPU.
    """
    # No usage report is sent to vLLM's developers, unless the user sets the variable otherwise.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device != "cpu":
        # The engine's start runs FlashInfer's sampler, which compiles its kernels with nvcc, and the image for GPUs has
        # no CUDA toolkit (vllm-project/vllm#49497). It samples nothing here: all requests have seeds, for which vLLM
        # uses its other sampler.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        return
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cpu_kv_cache_gib)
    # By default the CPU build binds its threads to cores that it selects itself. Several actors on one machine would
    # select the same cores, so binding is off and the number of threads is that of the pool's settings.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(threads)


def set_deepspeed_variables(*, device: str) -> None:
    """Set what DeepSpeed 0.19.8 reads when it is imported."""
    if device == "cpu":
        # DeepSpeed does not choose the CPU by itself where torch was built for GPUs.
        os.environ["DS_ACCELERATOR"] = "cpu"


def set_ray_variables() -> None:
    """Set what Ray 2.60 reads when it starts."""
    # Ray's core logs an error line for every restartable actor that a dataset makes (ray#53727).
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")


def skip_expected_ray_messages() -> None:
    """Keep Ray 2.60 from printing what is not an error here. Ray reads the variable when it is imported."""
    # Several pools of processes that mostly wait share a laptop's cores; and Ray Data ends its actors by `ray.kill`.
    expected = r"PYTHON worker processes have been started on node|it was killed by .?ray\.kill"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", expected)


def use_ray_token() -> None:
    """Make Ray 2.60 use the token that the user has set. Ray reads the variable when it is imported."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def sends_ray_token() -> bool:
    """Whether Ray 2.60's clients send a token: that of the variables above, or of ~/.ray/auth_token."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def ignore_ray_addresses() -> None:
    """Make Ray's job client use the address that it is given: Ray 2.60 prefers these variables."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        os.environ.pop(name, None)


def disable_preemption_watcher() -> None:
    """Keep Ray Train 2.60 from starting its own preemption watcher; it passes the variable to its controller."""
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"


def names_cluster() -> bool:
    """Whether RAY_ADDRESS names a cluster. `local` asks for what happens without it: Ray on this machine."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")
