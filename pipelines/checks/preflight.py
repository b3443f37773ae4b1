"""Checks before the first stage, also by `--dry-run`: what would end a run later is rejected here, within seconds.

Each check is a function of what a command is about to do. Ray is not imported, and nothing is left behind.
"""

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from pos2distill.config import PoolSection, Recipe, TrainersSection
from pos2distill.errors import MachineError, TransientError, UserError
from pos2distill.faults import refuses_access
from pos2distill.models.files import files_version, is_hub_name, reject_unindexed_copy
from pos2distill.store.checkpoint_layout import MODEL_FOLDER
from pos2distill.store.storage import check_storage
from pos2distill.training.trackers import check_trackers
from pos2distill.urls import open_url

from ..pending import is_pending
from ..plan import Plan
from ..progress_bar import show_activity
from ..stages.distill import check_executor
from ..stages.made_from import reject_changed_input, require_unchanged_measurements
from ..stages.resolve import with_distilled
from ..stages.stage import Stage
from .gpu_checks import check_gpus
from .machine_checks import check_cpus, check_ray, check_rights, check_space, check_temporary_space
from .model_checks import (
    check_against_model,
    check_gold_responses,
    check_tokenizer,
    check_weights_once,
)
from .pending_run import PendingRun
from .setting_warnings import warn_of_settings


def preflight(recipe: Recipe, plan: Plan, stages: Sequence[Stage]) -> None:
    """Run all checks, unless all stages are finished. `check_prompts` follows when the examples are prepared.

    Raises:
        UserError: the error of the first check that fails.
    """
    check_storage(recipe.storage, recipe.name)
    for stage in stages:
        reject_changed_input(stage)
    if plan.evaluate_distilled in stages and plan.distill not in stages:
        require_unchanged_measurements(plan.distill, stages)
    pending = [stage for stage in stages if is_pending(stage, plan, stages, recipe.runtime)]
    # Not if all is cached: to import transformers takes longer than to show the results.
    if not pending:
        return
    show_activity("checking the settings, the model and this machine")
    run = PendingRun(recipe, plan, pending)
    for check in CHECKS:
        check(run)
    warn_of_settings(recipe, pending)


def check_needs_weights(run: PendingRun) -> None:
    """Raise if a study that can only be evaluated is to be trained, sampled or analyzed."""
    evaluation = run.plan.stages_for_evaluate()
    if all(stage in evaluation for stage in run.pending):
        return
    if not run.study.data.train_examples:
        raise UserError(
            "data.train_examples: 0 is for the command evaluate only: there is nothing to train on; set "
            "data.train_examples and data.eval_fraction"
        )
    if not run.study.has_weights:
        raise UserError(
            "model.engine: 'openai' is for the command evaluate only: a server returns text, without the token ids and "
            "the weights that training needs; set model.engine to vllm or hf"
        )


def check_executors(run: PendingRun) -> None:
    """Raise if a training that is to be continued was begun by the other executor."""
    for each in run.plan.rounds:
        if each.distill in run.pending:
            check_executor(each.distill, run.recipe.runtime.executor)


def check_tracker_logins(run: PendingRun) -> None:
    """Raise if a tracker that the settings name is not installed, or cannot be logged in to."""
    if run.trains:
        check_trackers(run.recipe.runtime.trackers)


def check_attention(run: PendingRun) -> None:
    """Raise if the attention runs on GPUs only, and no process of the run has one."""
    runtime, model = run.recipe.runtime, run.study.model
    if model.attention == "flash_attention_2" and not (runtime.samplers.gpus or runtime.trainers.gpus):
        raise UserError(
            "model.attention: flash_attention_2 runs on GPUs, and runtime.samplers.gpus and runtime.trainers.gpus "
            "are 0; set it to auto"
        )


def check_lasting_storage(run: PendingRun) -> None:
    """Raise if the storage is in the memory of this process."""
    if run.recipe.storage.startswith("memory://"):
        raise UserError(f"{run.recipe.storage}: ends with this process; set runtime.storage to a folder or URL")


def check_revision(run: PendingRun) -> None:
    """Raise if a model that has no revisions is given one."""
    model = run.study.model
    # For a name on a server, a revision only distinguishes models that had it at different times.
    has_revisions = model.uses_chat_api or is_hub_name(model.path)
    if model.revision is not None and not has_revisions:
        raise UserError(f"model.revision: {model.path} is not a hub name and has no revisions; set model.revision=null")


def check_storage_folder(run: PendingRun) -> None:
    """Raise if the storage is in the model's folder: what a run writes there would make it another model."""
    storage, model = run.recipe.storage, run.study.model
    if model.uses_chat_api or is_hub_name(model.path):
        return
    fs, folder = open_url(storage, "runtime.storage")
    model_fs, model_folder = open_url(model.path, "model.path")
    if isinstance(fs, LocalFileSystem):  # by a link, or by `..`
        folder, model_folder = os.path.realpath(folder), os.path.realpath(model_folder)
    if type(fs) is type(model_fs) and f"{folder}/".startswith(f"{model_folder.rstrip('/')}/"):
        raise UserError(
            f"runtime.storage: {storage}: is inside the model's folder {model.path}, so that what a run writes would "
            f"make it another model; choose a folder elsewhere"
        )


def check_model_folders(run: PendingRun) -> None:
    """Raise if vLLM would find no weights in a model's folder, or two copies of them.

    vLLM 0.32 finds weights by a pattern that begins with their folder, so that it finds none in a folder whose name
    looks like a pattern.
    """
    if run.study.model.engine != "vllm":
        return
    # A URL or a hub name is no folder here, and their copies on this machine leave such files out.
    reject_unindexed_copy(run.study.model, Path(run.study.model.path))
    folders = {"model.path": run.study.model.path}
    if run.trains or run.plan.evaluate_distilled in run.pending:
        folders["runtime.storage"] = run.recipe.storage
    for setting, folder in folders.items():
        if "://" not in folder and glob.escape(folder) != folder:
            raise UserError(
                f"{setting}: vLLM loads no model from {folder}, since it takes [, * and ? for a pattern; rename the "
                f"folder, or set model.engine to hf"
            )


def check_engine_args(run: PendingRun) -> None:
    """Raise if vLLM has no such arguments, or other settings determine them."""
    model, runtime = run.study.model, run.recipe.runtime
    if model.engine == "vllm" and model.engine_args:
        from pos2distill.sampling.engines import vllm_arguments

        vllm_arguments.check_engine_args(model, runtime.vllm, device=runtime.samplers.device)


def check_model(run: PendingRun) -> None:
    """Raise if the config contradicts the settings or the weights, or the tokenizer has no suitable chat template.

    Of a model on a server, raise if the server does not have it; nothing of it, or its config and tokenizer alone, are
    here.
    """
    if not run.study.has_weights:
        from pos2distill.sampling.engines.openai_server import check_endpoint

        check_endpoint(run.study.model, run.recipe.runtime.endpoint)
        if not run.study.model.uses_chat_api:
            check_tokenizer(run.study, files_version(run.study.model))
        return
    # Listed once, which is a request for a model at a URL.
    version = files_version(run.study.model)
    check_against_model(run.study)
    check_weights_once(run.study.model, version)
    runtime = run.recipe.runtime
    if run.study.model.engine == "hf" and run.answers:
        from pos2distill.models.check import check_engine_attention

        check_engine_attention(run.study.model, on_gpu=runtime.samplers.gpus > 0)
    # Where the model computes packed rows: teachers and analyses read hidden states as training does.
    pools: list[PoolSection | TrainersSection] = []
    if run.trains:
        pools.append(runtime.trainers)
    if run.encodes or run.analyses:
        pools.append(runtime.teachers)
    for on_gpu in {pool.gpus > 0 for pool in pools}:
        from pos2distill.models.check import check_trainable

        checkpoints_activations = run.trains and runtime.trainers.gradient_checkpointing
        check_trainable(run.study.model, on_gpu=on_gpu, gradient_checkpointing=checkpoints_activations)
    # In float32, it rounds nothing.
    if run.trains and runtime.trainers.strategy == "zero3" and run.study.training.precision == "bfloat16":
        from pos2distill.models.check import check_sharded

        check_sharded(run.study.model)
    check_tokenizer(run.study, version)
    if run.trains and run.study.method.spec.target == "gold":
        check_gold_responses(run.study)


def check_trained_models(run: PendingRun) -> None:
    """Raise if a finished checkpoint that a stage will load is corrupt."""
    checked = set()
    for stage in run.pending:
        trained = stage.inputs.get("checkpoint") or stage.inputs.get("student")
        if trained is None or trained.artifact.url in checked or not trained.artifact.is_finished:
            continue
        checked.add(trained.artifact.url)
        trained.artifact.require(MODEL_FOLDER)
        study = with_distilled(run.study, stage.inputs)
        try:
            version = files_version(study.model)
            check_weights_once(study.model, version)
            check_tokenizer(study, version)
        except (TransientError, MachineError):
            raise
        except UserError as error:
            if refuses_access(error):
                raise
            url = trained.artifact.url
            raise UserError(
                f"{url}/{MODEL_FOLDER}: corrupt ({error}); delete {url} and run again to make it again"
            ) from None


CHECKS: tuple[Callable[[PendingRun], None], ...] = (
    check_needs_weights,
    check_attention,
    check_lasting_storage,
    check_revision,
    check_storage_folder,
    check_model_folders,
    check_tracker_logins,
    check_ray,
    check_rights,
    check_executors,
    check_model,
    check_engine_args,
    check_trained_models,
    check_gpus,
    check_cpus,
    check_space,
    check_temporary_space,
)
