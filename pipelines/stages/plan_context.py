"""What the stages of a study are planned from."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pos2distill.config import Study
from pos2distill.store.artifacts import Manifest

from .stage import Digests, Input, RunContext, Stage


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What the stages of a study are planned from.

    Attributes:
        study: as it is computed with, with the commit of a hub model.
        prepare: the stage that prepares its data.
        search_scales, choose_slot: the stages that measure what settings ask for; None where nothing asks for it.
        task: the name of another task that the models are evaluated on; None for the study's own.
    """

    study: Study
    storage: str
    digests: Digests
    prepare: Stage
    search_scales: Stage | None = None
    choose_slot: Stage | None = None
    task: str | None = None

    def declare(
        self,
        *,
        name: str,
        folder: str,
        fields: Collection[str],
        run: Callable[[Stage, RunContext], Manifest],
        inputs: Mapping[str, Input],
        derived: Mapping[str, Any] | None = None,
        streams: Mapping[str, Stage] | None = None,
    ) -> Stage:
        """A stage of the study, see `Stage.declare`."""
        return Stage.declare(
            self.study,
            self.storage,
            self.digests,
            name=name,
            folder=folder,
            fields=fields,
            run=run,
            inputs=inputs,
            derived=derived,
            streams=streams,
        )

    @property
    def scale_inputs(self) -> dict[str, Input]:
        """The searched RoPE scales, as input of the stages that run the model."""
        return {} if self.search_scales is None else {"scales": self.search_scales.output()}

    @property
    def training_inputs(self) -> dict[str, Input]:
        """Measured inputs of sampling and training: the RoPE scales, the advantageous slot."""
        inputs = self.scale_inputs
        if self.choose_slot is not None and self.study.method.advantageous_slot == "auto":
            inputs["slot"] = self.choose_slot.output()
        return inputs

    @property
    def evaluation_inputs(self) -> dict[str, Input]:
        """Measured inputs of evaluations: the RoPE scales, the curve that documents are reordered by."""
        inputs = self.scale_inputs
        if self.choose_slot is not None and self.study.inference.reorders:
            inputs["curve"] = self.choose_slot.output()
        return inputs
