"""The built-in toy at a size that a test can afford."""

# In this process, without Ray: the same results, sooner. tests/integration/test_study.py shows them on Ray.
LOCAL = "runtime.executor=local"

# Overrides of the quickstart recipe: 12 documents, of whose slots 4 are evaluated.
SMALL = [
    "data.documents=12",
    "data.train_examples=40",
    "data.train_candidates=40",
    "data.eval_examples=8",
    "evaluation.slots=4",
    "evaluation.other_documents=[16]",
    "evaluation.other_slots=2",
    "evaluation.bootstrap_samples=200",
    # Equal bytes under both executors: sums depend on the number of threads, which in one process is the same for all.
    "training.order=fixed",
    "runtime.samplers.threads=1",
    "runtime.teachers.threads=1",
    "runtime.trainers.threads=1",
    "runtime.samplers.max=1",
    "runtime.samplers.min=1",
]
