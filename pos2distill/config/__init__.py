"""The settings of a recipe: what defines a result (`Study`), and where and how it runs (`Runtime`).

Only a study is fingerprinted: tests prove that results do not depend on the runtime, but for the order of the first
epoch's examples if `training.order` is `arrival`.
Parsing imports no torch, ray or vllm.
"""

from pos2distill.config.analysis import AnalysisSection
from pos2distill.config.base import Section, fingerprint
from pos2distill.config.data import DataSection
from pos2distill.config.evaluation import EvaluationSection
from pos2distill.config.method import MethodSection
from pos2distill.config.method_table import METHODS, Method
from pos2distill.config.model import ModelSection
from pos2distill.config.recipe import Recipe
from pos2distill.config.restrict import restrict
from pos2distill.config.runtime import (
    CheckpointsSection,
    EndpointSection,
    FakeSection,
    PoolSection,
    Runtime,
    TrainersSection,
    VllmSection,
)
from pos2distill.config.sampling import SamplingSection
from pos2distill.config.study import Study
from pos2distill.config.template import TemplateSection
from pos2distill.config.training import LoraSection, TrainingSection

__all__ = [
    "METHODS",
    "AnalysisSection",
    "CheckpointsSection",
    "DataSection",
    "EndpointSection",
    "EvaluationSection",
    "FakeSection",
    "LoraSection",
    "Method",
    "MethodSection",
    "ModelSection",
    "PoolSection",
    "Recipe",
    "Runtime",
    "SamplingSection",
    "Section",
    "Study",
    "TemplateSection",
    "TrainersSection",
    "TrainingSection",
    "VllmSection",
    "fingerprint",
    "restrict",
]
