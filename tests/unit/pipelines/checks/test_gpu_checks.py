"""What a run says of the GPUs of this machine before it starts."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.checks.gpu_checks import check_gpus
from pipelines.checks.pending_run import PendingRun
from pipelines.commands import COMMANDS
from pipelines.plan import Plan, make_plan
from pos2distill import hardware
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import UserError, warn_once

Make = Callable[..., Recipe]


def pending_run(recipe: Recipe, command: str = "study") -> PendingRun:
    """What a command is about to do, with no stage finished."""
    plan = make_plan(recipe)
    return PendingRun(recipe, plan, COMMANDS[command].stages(plan))


@pytest.mark.parametrize(
    ("address", "settings", "pools"),
    [
        ("", {"executor": "ray"}, ["samplers", "teachers", "trainers"]),
        ("", {"executor": "ray", "method": "seqkd"}, ["samplers", "trainers"]),
        ("", {"executor": "ray", "pending": Plan.stages_for_evaluate}, ["samplers"]),
        ("", {"executor": "ray", "pending": lambda plan: [plan.distill]}, ["trainers"]),
        (
            "",
            {"executor": "ray", "pending": Plan.stages_for_analyze, "analysis": {"examples": 3}},
            ["samplers", "teachers"],
        ),
        ("ADDRESS", {"executor": "ray"}, []),
    ],
)
def test_check_gpus_warns_of_a_machine_without_any(
    make_recipe: Make,
    address: str,
    settings: dict[str, Any],
    pools: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    gpus = {name: {"gpus": 0.5} for name in ("samplers", "teachers", "trainers")}
    recipe = make_recipe(
        method={"name": settings.get("method", "r1")},
        analysis=settings.get("analysis"),
        runtime={"executor": settings["executor"], **gpus},
    )
    plan = make_plan(recipe)
    pending = settings["pending"](plan) if "pending" in settings else plan.stages
    check_gpus(PendingRun(recipe, plan, pending))
    names = ", ".join(f"runtime.{pool}.gpus" for pool in pools)
    expected = (
        f"warning: {names}: this machine has no GPU that torch can use; install torch for GPUs (docs/running.md), run "
        f"on a cluster (RAY_ADDRESS), or set 0\n"
    )
    assert capsys.readouterr().err == (expected if pools else "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_gpus(PendingRun(recipe, plan, plan.stages))
    assert capsys.readouterr().err == ""


def test_check_gpus_rejects_a_local_run_on_a_machine_without_any(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cluster can have the GPUs, and torch would end the run with a traceback."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    recipe = make_recipe(runtime={"executor": "local", "samplers": {"gpus": 1}, "trainers": {"gpus": 1}})
    with pytest.raises(UserError) as caught:
        check_gpus(pending_run(recipe, "evaluate"))
    assert str(caught.value) == (
        "runtime.samplers.gpus: this machine has no GPU that torch can use; install torch for GPUs (docs/running.md), "
        "or set 0"
    )


SEVERAL = {"min": 2, "max": 2}
ALL = ["runtime.samplers.gpus=1", "runtime.teachers.gpus=1", "runtime.trainers.gpus=1"]


@pytest.mark.parametrize(
    ("gpus", "settings", "command", "added"),
    [
        (3, {}, "study", ALL),
        (2, {}, "study", [*ALL, "runtime.mode=staged"]),
        (2, {"runtime": {"mode": "staged"}}, "study", ALL),
        (2, {"runtime": {"executor": "local"}}, "study", ALL),
        (5, {"runtime": {"trainers": {"workers": 3}}}, "study", ALL),
        (4, {"runtime": {"trainers": {"workers": 3}}}, "study", [*ALL, "runtime.mode=staged"]),
        (
            4,
            {"model": {"engine": "vllm"}, "runtime": {"vllm": {"tensor_parallel_size": 2}}},
            "study",
            ["runtime.samplers.gpus=2", *ALL[1:]],
        ),
        (
            1,
            {"model": {"engine": "vllm"}},
            "study",
            [
                *("runtime.samplers.gpus=0.5", "runtime.teachers.gpus=0.5", "runtime.trainers.gpus=1"),
                *("runtime.vllm.gpu_memory_utilization=0.5", "runtime.mode=staged"),
            ],
        ),
        (1, {"runtime": {"executor": "local"}}, "evaluate", ["runtime.samplers.gpus=1"]),
        (
            1,
            {"model": {"engine": "vllm"}, "runtime": {"samplers": {"min": 2, "max": 2}}},
            "evaluate",
            ["runtime.samplers.min=1", "runtime.samplers.gpus=1"],
        ),
        (
            3,
            {"model": {"engine": "vllm"}, "runtime": {"vllm": {"tensor_parallel_size": 2}}},
            "study",
            ["runtime.samplers.gpus=2", *ALL[1:], "runtime.mode=staged"],
        ),
        (
            1,
            {"model": {"engine": "vllm"}, "runtime": {"vllm": {"tensor_parallel_size": 2}}},
            "evaluate",
            ["runtime.samplers.gpus=1", "runtime.vllm.tensor_parallel_size=1"],
        ),
        (
            4,
            {"model": {"engine": "vllm"}, "runtime": {"vllm": {"tensor_parallel_size": 4}}},
            "study",
            ["runtime.samplers.gpus=2", *ALL[1:], "runtime.vllm.tensor_parallel_size=2"],
        ),
        (
            1,
            {"model": {"engine": "vllm"}, "runtime": {"vllm": {"tensor_parallel_size": 2}, "mode": "staged"}},
            "study",
            [
                *("runtime.samplers.gpus=0.5", "runtime.teachers.gpus=0.5", "runtime.trainers.gpus=1"),
                *("runtime.vllm.gpu_memory_utilization=0.5", "runtime.vllm.tensor_parallel_size=1"),
            ],
        ),
        (
            2,
            {"runtime": {"trainers": {"workers": 3}}},
            "study",
            [*ALL[:2], "runtime.trainers.workers=2", ALL[2], "runtime.mode=staged"],
        ),
        (2, {"runtime": {"samplers": SEVERAL}}, "evaluate", ["runtime.samplers.gpus=1"]),
        (1, {"runtime": {"samplers": SEVERAL}}, "evaluate", ["runtime.samplers.min=1", "runtime.samplers.gpus=1"]),
        (
            2,
            {"runtime": {"teachers": SEVERAL, "trainers": {"workers": 3}, "mode": "staged"}},
            "study",
            [ALL[0], "runtime.teachers.min=1", ALL[1], "runtime.trainers.workers=2", ALL[2]],
        ),
        (1, {"runtime": {"executor": "local", "mode": "staged"}}, "study", ALL),
        (1, {"runtime": {"executor": "local"}}, "study", ALL),
        # One process keeps the engine's memory while the teacher, or the student, is on the same GPU.
        *(
            (
                gpus,
                {"model": {"engine": "vllm"}, "runtime": {"executor": "local"}, "method": {"name": method}},
                "study",
                [*settings, "runtime.mode=staged"],
            )
            for gpus in (1, 2)
            for method, settings in (
                ("r1", [*ALL, "runtime.vllm.gpu_memory_utilization=0.5"]),
                ("seqkd", [ALL[0], ALL[2]]),
            )
        ),
        (1, {"model": {"engine": "fake"}}, "evaluate", []),
        (0, {}, "study", []),
    ],
)
def test_check_gpus_names_the_settings_with_which_unused_gpus_are_used(
    make_recipe: Make,
    gpus: int,
    settings: dict[str, Any],
    command: str,
    added: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: gpus)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(hardware, "version", lambda _: "2.13.0")
    recipe = make_recipe(**settings)
    for _ in range(2):  # as for two studies of a sweep
        check_gpus(pending_run(recipe, command))
    found = "a GPU" if gpus == 1 else f"{gpus} GPUs"
    line = f"warning: this machine has {found} that this run does not use; add {' '.join(added)} (docs/running.md)\n"
    assert capsys.readouterr().err == (line if added else "")
    # The settings are right: with them, nothing more is said.
    with_gpus = load_recipe(str(Path(recipe.study.data.path).with_name("recipe.yaml")), added)
    check_gpus(pending_run(with_gpus, command))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("runtime", "settings"),
    [
        (
            {"samplers": {"gpus": 0.5}, "vllm": {"gpu_memory_utilization": 0.4}},
            "runtime.teachers.gpus=0.5 runtime.trainers.gpus=1 runtime.mode=staged",
        ),
        (
            {"samplers": {"gpus": 0.4}, "mode": "staged", "vllm": {"gpu_memory_utilization": 0.4}},
            "runtime.teachers.gpus=0.6 runtime.trainers.gpus=1",
        ),
        (
            {"teachers": {"gpus": 0.25}, "mode": "staged", "vllm": {"gpu_memory_utilization": 0.75}},
            "runtime.samplers.gpus=0.75 runtime.trainers.gpus=1",
        ),
        # One process uses it in turn, but an engine keeps its memory.
        (
            {"executor": "local", "samplers": {"gpus": 1}, "trainers": {"gpus": 1}},
            "runtime.teachers.gpus=1 runtime.vllm.gpu_memory_utilization=0.5 runtime.mode=staged",
        ),
    ],
)
def test_check_gpus_names_only_what_is_missing_to_share_a_gpu(
    make_recipe: Make,
    runtime: dict[str, Any],
    settings: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    recipe = make_recipe(model={"engine": "vllm"}, runtime=runtime)
    check_gpus(pending_run(recipe))
    assert capsys.readouterr().err.endswith(f"use GPUs; for GPUs, add {settings}\n")


@pytest.mark.parametrize(
    ("address", "gpus", "runtime", "advice"),
    [
        ("10.0.0.1:6379", 0, {}, "add runtime.teachers.gpus=1"),
        ("local", 8, {}, "add runtime.teachers.gpus=1"),
        ("local", 3, {}, "add runtime.teachers.gpus=1"),
        ("local", 2, {}, "add runtime.teachers.gpus=1 runtime.mode=staged"),
        ("local", 1, {"mode": "staged"}, "add runtime.samplers.gpus=0.5 runtime.teachers.gpus=0.5"),
        ("local", 1, {"executor": "local"}, "add runtime.teachers.gpus=1"),
        (
            "local",
            4,
            {"samplers": {"min": 4, "max": 4}, "trainers": {"workers": 4}, "mode": "staged"},
            "add runtime.samplers.min=3 runtime.teachers.gpus=1",
        ),
    ],
)
def test_check_gpus_names_a_pool_that_runs_the_model_on_cpus_beside_others(
    make_recipe: Make,
    address: str,
    gpus: int,
    runtime: dict[str, Any],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: gpus)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    on_gpus = {pool: {**runtime.get(pool, {}), "gpus": 1} for pool in ("samplers", "trainers")}
    recipe = make_recipe(runtime={**runtime, **on_gpus})
    for _ in range(2):
        check_gpus(pending_run(recipe))
    assert capsys.readouterr().err == (
        f"warning: teachers run the model on CPUs, while samplers and trainers use GPUs; for GPUs, {advice}\n"
    )


def test_check_gpus_leaves_those_of_a_cluster_to_it(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 1)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    recipe = make_recipe()
    check_gpus(pending_run(recipe))
    assert capsys.readouterr().err == ""


ON_CPUS = {"samplers": {"gpus": 0}, "teachers": {"gpus": 0}}
TOO_FEW = (
    "warning: this run needs {} GPUs at the same time, this machine has {}; run on a cluster (RAY_ADDRESS), or add {}\n"
)


@pytest.mark.parametrize(
    ("gpus", "runtime", "command", "needed", "added"),
    [
        (2, {"trainers": {"workers": 4}, "mode": "staged"}, "study", 4, ["runtime.trainers.workers=2"]),
        (2, {"trainers": {"workers": 4}}, "study", 6, ["runtime.trainers.workers=2", "runtime.mode=staged"]),
        (2, {}, "study", 3, ["runtime.mode=staged"]),
        (2, {"mode": "staged"}, "study", None, []),
        (1, {}, "study", 3, ["runtime.samplers.gpus=0.5", "runtime.teachers.gpus=0.5", "runtime.mode=staged"]),
        (1, {"mode": "staged"}, "sample", 2, ["runtime.samplers.gpus=0.5", "runtime.teachers.gpus=0.5"]),
        (1, {"samplers": {"gpus": 0.5}, "teachers": {"gpus": 0.5}, "mode": "staged"}, "study", None, []),
        (2, {"samplers": {"gpus": 0.6, "min": 3, "max": 3}}, "evaluate", 3, ["runtime.samplers.min=2"]),
        (2, {"samplers": {"gpus": 0.5, "min": 3, "max": 3}}, "evaluate", None, []),
        (2, {"samplers": {"gpus": 0.4, "min": 6, "max": 6}}, "evaluate", 3, ["runtime.samplers.min=4"]),
        # Only what the command runs.
        (2, {"samplers": {"min": 3, "max": 3}, "trainers": {"workers": 4}}, "evaluate", 3, ["runtime.samplers.min=2"]),
        (1, {"samplers": {"gpus": 0.4}, "mode": "staged"}, "sample", 2, ["runtime.teachers.gpus=0.6"]),
        # The pools without GPUs stay so.
        (2, {**ON_CPUS, "trainers": {"workers": 4}, "mode": "staged"}, "study", 4, ["runtime.trainers.workers=2"]),
        (1, {"mode": "staged"}, "evaluate", None, []),
        (1, {"mode": "staged"}, "analyze", None, []),  # it answers and compares one after the other
        (1, {"executor": "local"}, "study", None, []),
    ],
)
def test_check_gpus_counts_those_that_are_needed_at_the_same_time(
    make_recipe: Make,
    gpus: int,
    runtime: dict[str, Any],
    command: str,
    needed: int | None,
    added: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Torch sees GPUs that have no device file here, as under WSL.
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    on_gpus = {pool: {"gpus": 1} | runtime.get(pool, {}) for pool in ("samplers", "teachers", "trainers")}
    recipe = make_recipe(analysis={"examples": 3}, runtime=runtime | on_gpus)
    check_gpus(pending_run(recipe, command))
    assert capsys.readouterr().err == ("" if needed is None else TOO_FEW.format(needed, gpus, " ".join(added)))
    with_enough = load_recipe(str(Path(recipe.study.data.path).with_name("recipe.yaml")), added)
    run = pending_run(with_enough, command)
    assert run.needed_gpus(with_enough.runtime) <= gpus


def test_check_gpus_rejects_an_engine_on_more_gpus_than_a_local_run_has(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 1)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    runtime = {"executor": "local", "samplers": {"gpus": 2}, "vllm": {"tensor_parallel_size": 2}}
    recipe = make_recipe(model={"engine": "vllm"}, runtime=runtime)
    with pytest.raises(UserError) as caught:
        check_gpus(pending_run(recipe, "evaluate"))
    assert str(caught.value) == (
        "this run needs 2 GPUs at the same time, this machine has 1; add runtime.samplers.gpus=1 "
        "runtime.vllm.tensor_parallel_size=1"
    )


def test_check_gpus_says_that_torch_was_built_for_cpus(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 4)
    monkeypatch.setattr(hardware, "version", lambda _: "2.13.0+cpu")
    recipe = make_recipe()
    check_gpus(pending_run(recipe, "evaluate"))
    assert capsys.readouterr().err == (
        "warning: this machine has 4 GPUs that this run does not use; install the packages for GPUs and add "
        "runtime.samplers.gpus=1 (docs/running.md)\n"
    )


def fit_on(parts: list[float], gpus: int) -> bool:
    """Whether processes with these parts of a GPU, or whole ones, can be placed: by trying every place."""
    whole = sum(int(part) for part in parts if part >= 1)
    rest = sorted((part for part in parts if 0 < part < 1), reverse=True)

    def place(number: int, rooms: tuple[float, ...]) -> bool:
        if number == len(rest):
            return True
        for room in {room for room in rooms if room + 1e-9 >= rest[number]}:
            left = list(rooms)
            left.remove(room)
            if place(number + 1, (*left, room - rest[number])):
                return True
        return False

    return whole <= gpus and place(0, (1.0,) * (gpus - whole))


def run_fits(run: PendingRun, gpus: int) -> bool:
    """Whether what runs at the same time fits so many GPUs, each stage by itself."""
    runtime = run.recipe.runtime
    parts = {
        pool: [runtime.pools[pool].gpus] * count if pool in run.model_pools else []
        for pool, count in (
            ("samplers", runtime.samplers.min),
            ("teachers", runtime.teachers.min),
            ("trainers", runtime.trainers.workers),
        )
    }
    if runtime.executor == "local":
        return all(fit_on(each[:1], gpus) for each in parts.values())
    sampling = parts["samplers"] + (parts["teachers"] if run.encodes else [])
    streamed = runtime.mode == "streamed" and run.samples
    training = parts["trainers"] + (sampling if streamed else [])
    return all(fit_on(each, gpus) for each in (sampling, parts["teachers"], training))


@pytest.mark.parametrize("seed", range(4))
def test_advice_of_check_gpus_can_be_followed(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Of random settings: with what is advised a recipe loads, fits the GPUs, and changes only pools that it runs."""
    generator = random.Random(seed)
    choose = generator.choice
    advised = 0
    for _ in range(40):
        warn_once.cache_clear()
        engine, gpus, command = choose(["hf", "vllm"]), choose([1, 2, 3, 4, 8]), choose(["study", "evaluate", "sample"])
        size = choose([1, 2, 3, 4]) if engine == "vllm" else 1
        part = choose([0.0, float(size), *([0.4, 0.5, 0.6, 0.9] if size == 1 else [])])
        runtime = {
            "executor": choose(["ray", "ray", "local"]),
            "mode": choose(["streamed", "staged"]),
            "samplers": {"gpus": part, "min": choose([1, 2, 5]), "max": 5},
            "teachers": {"gpus": choose([0, 0.25, 0.5, 1]), "min": choose([1, 2, 5]), "max": 5},
            "trainers": {"gpus": choose([0, 1]), "workers": choose([1, 2, 4])},
            "vllm": {"tensor_parallel_size": size, "gpu_memory_utilization": min(0.9, part or 0.9)},
        }
        try:
            recipe = make_recipe(model={"engine": engine}, method={"name": choose(["r1", "seqkd"])}, runtime=runtime)
        except UserError:  # several processes of a local run
            continue
        monkeypatch.setattr(hardware, "visible_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        run = pending_run(recipe, command)
        try:
            check_gpus(run)
            line = capsys.readouterr().err
        except UserError as error:
            line = str(error)
        if not line:
            assert run_fits(run, gpus), runtime
            continue
        advised += 1
        settings = re.findall(r"runtime\.\S+=\S+", line)
        changed = {setting.split(".")[1] for setting in settings if not setting.startswith("runtime.mode=")}
        assert changed <= {*run.model_pools, "vllm"}, (runtime, line)
        followed = load_recipe(str(Path(recipe.study.data.path).with_name("recipe.yaml")), settings)
        assert run_fits(pending_run(followed, command), gpus), (runtime, line)
    assert advised > 10


def test_check_gpus_of_distill_without_samples_names_the_command_that_makes_them(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In staged mode `distill` makes none."""
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    recipe = make_recipe(runtime={pool: {"gpus": 1} for pool in ("samplers", "teachers", "trainers")})
    check_gpus(pending_run(recipe, "distill"))
    assert capsys.readouterr().err == (
        "warning: this run needs 3 GPUs at the same time, this machine has 2; run on a cluster (RAY_ADDRESS), or run "
        "`sample` first, with runtime.mode=staged for both\n"
    )
