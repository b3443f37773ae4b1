"""The names of the artifacts, which stages write and commands look for."""

EXAMPLES = "examples"
ROPE_SCALES = "rope-scales"
SLOT_SCORES = "slot-scores"
BASE_SCORES = "base-scores"
SAMPLES = "samples"
CHECKPOINT = "checkpoint"
DISTILLED_SCORES = "distilled-scores"
SCORES = (DISTILLED_SCORES, BASE_SCORES)
BASE_ANALYSIS = "base-analysis"
DISTILLED_ANALYSIS = "distilled-analysis"
