"""What a study rejects before its first stage."""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from safetensors.torch import load_file, save_file

from pipelines import commands, stage_runner
from pipelines.dry_run import describe
from pipelines.plan import make_plan
from pipelines.provenance import read_provenance
from pos2distill.config import Recipe
from pos2distill.errors import Stopped, TransientError, UserError
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.lease import Lease
from scripts.model_families import save_tiny
from tests.support.commands import run_analyze, run_distill, run_evaluate, run_sample, run_study


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"method": {"teacher": "topk", "teacher_topk": 301}},
            r"^method.teacher_topk: 301, but .+ has 300 tokens$",
        ),
        (
            {"training": {"lora": {"targets": ["q_prj"]}}},
            r"^training.lora.targets: q_prj: not a linear layer of .+; did you mean 'q_proj'\?$",
        ),
        (
            # The search may choose 1/2, with which twice as many positions are needed.
            {
                "model": {"max_length": 256},
                "method": {"name": "seqkd", "view": "skip"},
                "inference": {"method": "lpes", "search": {"smallest": 0.5}},
            },
            r"^method.view: shifted rows need 1024 positions, .+ has 512",
        ),
    ],
)
def test_run_study_checks_settings_against_the_model_first(
    make_recipe: Callable[..., Recipe], overrides: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=message):
        run_study(make_recipe(**overrides))
    assert capsys.readouterr().out == ""  # no stage was run


@pytest.mark.parametrize("command", [run_study, describe])
def test_check_against_model_rejects_incomplete_weights(
    make_recipe: Callable[..., Recipe],
    tiny_model_path: str,
    tmp_path: Path,
    command: Callable[[Recipe], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also by `--dry-run`."""
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"model: tensor model.norm.weight of shape \[32\] is missing \(1 tensor of 21\)"
    ):
        command(make_recipe(model={"path": str(folder)}))
    assert capsys.readouterr().out == ""  # no stage was run


@pytest.mark.parametrize("command", [run_study, run_sample, describe, run_analyze])
def test_commands_that_read_hidden_states_reject_an_untrainable_family_first(
    make_recipe: Callable[..., Recipe],
    tiny_model_path: str,
    tmp_path: Path,
    command: Callable[[Recipe], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    save_tiny("gptj", folder)
    recipe = make_recipe(model={"path": str(folder), "max_length": 512}, analysis={"examples": 2})
    with pytest.raises(UserError, match=r"model: a model of the family 'gptj' cannot be trained: .+; supported: ape"):
        command(recipe)
    assert capsys.readouterr().out == ""  # no stage was run
    # An evaluation trains nothing.
    assert "to run" in describe(recipe, "evaluate")


def test_run_study_rejects_a_missing_tracker_first(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"^runtime.trackers: wandb is not installed"):
        run_study(make_recipe(runtime={"trackers": ["wandb"]}))
    assert capsys.readouterr().out == ""


COMMANDS: dict[str, Callable[[Recipe], object]] = {
    "study": run_study,
    "evaluate": run_evaluate,
    "sample": run_sample,
    "distill": run_distill,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_write_artifacts_hold_the_lease(
    make_recipe: Callable[..., Recipe], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def check_lease(*arguments: Any) -> None:
        fs, path = fsspec.url_to_fs(f"{recipe.storage}/driver.json")
        assert fs.exists(path)
        raise Reached

    recipe = make_recipe()
    monkeypatch.setattr(commands, "run_stages", check_lease)
    monkeypatch.setattr(commands, "_require_finished", lambda *arguments: None)
    with pytest.raises(Reached):
        COMMANDS[command](recipe)


def test_run_study_holds_the_lease_while_it_writes_the_report(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two drivers that move and write the folder at the same time would lose the report of one of them."""
    held: list[bool] = []

    def check_lease(*arguments: Any) -> None:
        fs, path = fsspec.url_to_fs(f"{recipe.storage}/driver.json")
        held.append(fs.exists(path))

    recipe = make_recipe()
    monkeypatch.setattr(commands, "run_stages", lambda *arguments: None)
    for report in ("_report", "_report_sweep"):
        monkeypatch.setattr(commands, report, check_lease)
    run_study(recipe)
    run_study(make_recipe(sweep={"seed": [0, 1]}))
    assert held == [True, True]


@pytest.mark.parametrize(("is_cli_process", "ended"), [(True, ["lost"]), (False, [])])
def test_a_lost_lease_ends_the_program_and_of_other_processes_the_call(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, is_cli_process: bool, ended: list[str]
) -> None:
    reported: list[str] = []
    monkeypatch.setattr(stage_runner, "exit_immediately", reported.append)
    monkeypatch.setattr(stage_runner, "is_cli_process", lambda: is_cli_process)
    monkeypatch.setattr(stage_runner, "hold_lease", lose_at_once)
    error: type[Exception] = Stopped if is_cli_process else TransientError
    with pytest.raises(error, match=r"^lost$"), stage_runner.driver_lease(make_recipe()):
        raise Stopped("lost", 130)
    assert reported == ended


@contextmanager
def lose_at_once(storage: str, *, on_lost: Callable[[str], None] | None) -> Iterator[Lease]:
    lease = Lease()
    (on_lost or lease.mark_lost)("lost")
    yield lease


def test_a_stage_that_is_stopped_after_it_was_published_keeps_its_provenance(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run finds the stage finished, and cannot know how it was made."""
    publish = Artifact.publish

    def publish_and_stop(self: Artifact, **arguments: Any) -> Manifest:
        manifest = publish(self, **arguments)
        if self.name == "samples":
            raise Stopped("stopped", 130)
        return manifest

    monkeypatch.setattr(Artifact, "publish", publish_and_stop)
    recipe = make_recipe(runtime={"executor": "local"})
    with pytest.raises(Stopped):
        run_sample(recipe)
    provenance = read_provenance(make_plan(recipe).first_sample.artifact)
    assert provenance is not None
    assert provenance.stage == "sample"


def test_describe_rejects_a_sweep_where_the_command_does(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(sweep={"method.k": [1, 2]})
    assert describe(recipe, "study").count("# study ") == 2
    for command in ("evaluate", "analyze", "sample", "distill"):
        with pytest.raises(UserError, match="is a sweep of several studies; this command takes one study"):
            describe(recipe, command)


def test_run_distill_shows_what_it_sampled_while_it_trained(
    make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(runtime={"executor": "local"})
    run_distill(recipe)
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines() if "  " in line] == [
        *("prepare", "sample", "distill", "checkpoint"),
    ]
    assert "sample              streamed  wanted 8, sampled 8, kept 8, surplus 0, wrong 0, empty 0, " in printed.out
    assert "warning: sample: 8 of 8 answers were cut at sampling.max_new_tokens" in printed.err
    run_distill(recipe)
    assert "sample              cached  wanted 8, " in capsys.readouterr().out
