"""Runs the stages of a plan that are not finished, as the only driver of the storage."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pos2distill.config import Recipe
from pos2distill.errors import TransientError, UserError, warn
from pos2distill.evaluation.count_warnings import count_warnings
from pos2distill.models.files import files_version, is_hub_name, model_digest
from pos2distill.startup import is_cli_process
from pos2distill.store.artifacts import Manifest
from pos2distill.store.checkpoint_layout import MODEL_FOLDER, STATE_FOLDER, STEPS_FOLDER
from pos2distill.store.lease import Lease, exit_immediately, hold_lease
from pos2distill.store.storage import claim_storage, release_storage, remove_if_empty
from pos2distill.urls import storage_errors

from .artifact_names import CHECKPOINT, EXAMPLES
from .checks.data_checks import check_prompts
from .executors import build_executor
from .executors.leased import LeasedExecutor
from .pending import is_pending
from .plan import Plan
from .provenance import Provenance, record_provenance
from .stages.made_from import (
    RECORD,
    changed_input,
    record_inputs,
    reject_changed_input,
    require_unchanged_measurements,
)
from .stages.stage import RunContext, Stage
from .terminal import summarize_manifest


def run_stages(recipe: Recipe, plan: Plan, stages: Sequence[Stage], lease: Lease) -> None:
    """Run the stages that are not finished, in order, and print a line for each.

    Raises:
        UserError: if a stage raises it; what the stages stored stays.
    """
    samples_while_training = plan.distill in stages and recipe.runtime.mode == "streamed"
    runner: _StageRunner | None = None
    streamed: list[Stage] = []
    for stage in stages:
        if stage is plan.evaluate_base and plan.distill not in stages:
            # What the command has just measured, before anything that was made with earlier results is deleted.
            require_unchanged_measurements(plan.distill, ())
        _discard_if_input_changed(stage)
        if not is_pending(stage, plan, stages, recipe.runtime):
            _check_finished(stage)
            _show(stage, "cached", stage.artifact.manifest())
        elif stage in plan.sample_stages and samples_while_training:
            # The round's stage `distill` trains on the samples while they are made, and publishes them.
            streamed.append(stage)
        else:
            # Made only when a stage must run, so that a finished study imports no Ray.
            runner = runner or _StageRunner(recipe, plan, stages, lease)
            runner.check_prompts_before(stage)
            start = time.monotonic()
            manifest = runner.run(stage)
            duration = f"{time.monotonic() - start:9.1f} s"
            for samples in streamed:
                _show(samples, "streamed", samples.artifact.manifest())
            streamed = []
            _show(stage, duration, manifest)
    # What the command writes beside artifacts, too.
    lease.check()


def _show(stage: Stage, duration: str, manifest: Manifest | None) -> None:
    """Print the line of a finished stage, and what its counts warn of."""
    if manifest is None:  # samples that a cached checkpoint does not need
        return
    print(f"{stage.name:<18}  {duration}  {summarize_manifest(manifest)}", flush=True)
    for warning in count_warnings(manifest.counts):
        warn(f"{stage.name}: {warning}")


def _discard_if_input_changed(stage: Stage) -> None:
    """Delete an artifact if one of its inputs changed: a model was trained again, or a measurement has another result.

    Raises:
        UserError: instead, for samples and checkpoints.
    """
    changed = changed_input(stage)
    if changed is not None:
        reject_changed_input(stage)
        print(f"{stage.name:<18}  made again, as {changed.artifact.folder} was", flush=True)
        stage.artifact.discard(last=RECORD)


def _check_finished(stage: Stage) -> None:
    """Check that a finished checkpoint is whole.

    Raises:
        UserError: if a finished checkpoint is not whole.
    """
    if stage.artifact.name == CHECKPOINT:
        stage.artifact.require(MODEL_FOLDER, STEPS_FOLDER)
        # A run that was killed once it had published the checkpoint could leave it; it is several times as large.
        stage.artifact.remove(STATE_FOLDER)


class _StageRunner:
    """Runs single stages on one executor, and records how their artifacts were made.

    Args:
        stages: all stages of the command.
    """

    def __init__(self, recipe: Recipe, plan: Plan, stages: Sequence[Stage], lease: Lease) -> None:
        self.recipe = recipe
        self.plan = plan
        self.stages = stages
        self.lease = lease
        self.model_version = ""  # of the files that the last stage began with
        self.prompts_are_checked = False
        self.provenance = Provenance.now(recipe, plan.study.model, model_digest=plan.model_digest)
        settings = plan.study.model_dump(mode="json")
        executor = LeasedExecutor(build_executor(recipe.runtime), lease)
        self.context = RunContext(recipe.name, settings, recipe.runtime, executor, lease)

    def check_prompts_before(self, stage: Stage) -> None:
        """Check all prompts once the data of all tasks is prepared, and before anything expensive starts.

        Raises:
            UserError: if a prompt does not fit.
        """
        if not self.prompts_are_checked and stage.artifact.name != EXAMPLES:
            check_prompts(self.recipe, self.plan, self.stages)
            self.prompts_are_checked = True

    def run(self, stage: Stage) -> Manifest:
        """Run one stage, which publishes its artifact.

        Raises:
            UserError: if the model is another one than was planned with; otherwise as the stage.
        """
        self.lease.check()
        if stage.study.model.path:
            self._require_same_model()
        for each in (*stage.streams.values(), stage):
            record_inputs(each)
        try:
            manifest = stage.run(stage, self.context)
        except BaseException:
            # Also for what a stopped stage has finished: later it is found finished, and nothing records it.
            with contextlib.suppress(Exception):
                self.lease.check()
                self._record_provenance(stage)
            raise
        self._record_provenance(stage)
        return manifest

    def _require_same_model(self) -> None:
        """Reject a model whose files were replaced since the study was planned.

        Its results would be taken for those of the earlier model. Not checked: a model of a hub, which is pinned to a
        commit; one behind an API, whose files are unknown; one on a web server, which lists no files, so that all of
        them would be downloaded before each stage.

        Raises:
            UserError: with what to do.
        """
        model = self.plan.study.model
        if model.engine == "openai" or is_hub_name(model.path) or model.path.startswith(("http://", "https://")):
            return
        version = files_version(model)
        # Read again only if a listing shows a change.
        if version != self.model_version:
            with storage_errors(model.path, "model.path"):
                digest = model_digest(model)
            if digest != self.plan.model_digest:
                raise UserError(f"{model.path}: changed since this command began; run it again (model.path)")
        self.model_version = version

    def _record_provenance(self, stage: Stage) -> None:
        provenance = self.provenance.dated()
        for name, task in self.plan.other_tasks.items():
            if stage in (task.prepare, task.evaluate_base, task.evaluate_distilled):
                provenance = provenance.of_task(name, task.study)
        for finished in (stage, *stage.streams.values()):
            inputs = {name: each.artifact for name, each in finished.inputs.items()}
            # Made for another study of the sweep.
            is_shared = finished is self.plan.first_sample and self.plan.sampled_study is not self.plan.study
            own = provenance.of_study(self.plan.sampled_study) if is_shared else provenance
            record_provenance(finished.artifact, own, finished.name, inputs)


@contextmanager
def driver_lease(recipe: Recipe) -> Iterator[Lease]:
    """The right to make artifacts in the storage, which one driver at a time has.

    If it is lost, the program ends at once. In a process that only calls these functions, such as a notebook, only the
    call fails.

    Raises:
        TransientError: if the lease is lost in such a process.
    """
    # Another recipe's storage is rejected now, not after waiting for its driver to end.
    is_new = claim_storage(recipe.storage, recipe.name)
    try:
        with hold_lease(recipe.storage, on_lost=exit_immediately if is_cli_process() else None) as lease:
            claim_storage(recipe.storage, recipe.name)  # again: the previous driver may have released it
            try:
                yield lease
            except Exception as error:
                # What failed after the loss may have failed because of it.
                if not isinstance(error, TransientError):
                    lease.check()
                raise
            finally:
                # The body's own outcome counts. A storage that stays claimed is this recipe's.
                with contextlib.suppress(Exception):
                    lease.check()
                    release_storage(recipe.storage)
    finally:
        if is_new:
            remove_if_empty(recipe.storage)
