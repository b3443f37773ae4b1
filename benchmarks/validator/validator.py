"""What does `cluster validate` report about valid manifests of others, and faulty ones? Writes `validator.json`.

Example (a minute on two cores; --samples adds a set to those of the last report):
  python -m benchmarks.validator.validator --crds FOLDER --samples FOLDER
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances
from benchmarks.validator.faults import MANIFESTS, OBJECTS, SPECS
from cluster.job_command import load_job
from cluster.render import render
from cluster.spec import load_cluster
from cluster.spec_warnings import spec_warnings
from cluster.types import KubeManifest
from cluster.validate import check, load_manifests
from pos2distill.errors import UserError
from tests.support.manifests import changed

REPORT = Path(__file__).parent / "validator.json"
_STUDY = ("nq_llama3_8b", ["data.path=s3://bucket/nq.jsonl.gz", "runtime.trainers.workers=8"])
_SPEC_STUDY = ("nq_mistral_7b", ["data.path=gs://bucket/nq.jsonl.gz", "runtime.trainers.workers=8"])
MISSED = "missed"


def worst_level(manifests: list[KubeManifest], crds: str) -> str:
    """The worst level that is reported: error, policy or warning; or that the fault was missed."""
    levels = {str(finding.level) for finding in check(manifests, crds)}
    for level in ("error", "policy", "warning"):
        if level in levels:
            return level
    return MISSED


def counts(outcomes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """How many faults had each outcome, and the names of the missed ones."""
    outcomes = list(outcomes)
    tally = Counter(outcome for _, outcome in outcomes)
    missed = [name for name, outcome in outcomes if outcome == MISSED]
    return {"cases": len(outcomes), **dict(sorted(tally.items())), "names of the missed": missed}


def check_samples(folder: Path, crds: str) -> dict[str, Any]:
    """What is reported about the files of a folder, with and without the CRDs."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml"))
    names = [str(path.relative_to(folder)) for path in files]
    return {
        "date": circumstances()["date"],
        "files": names,
        "with --crds": findings_of(folder, files, crds),
        "without": findings_of(folder, files, None),
    }


def findings_of(folder: Path, files: list[Path], crds: str | None) -> dict[str, Any]:
    """The number of findings of each level, and what is refused."""
    levels: Counter[str] = Counter()
    refused, documents = [], 0
    for path in files:
        try:
            manifests = load_manifests(path) or []
        except UserError as error:
            refused.append(str(error).replace(f"{folder}/", ""))
            continue
        documents += len(manifests)
        for finding in check(manifests, crds):
            levels[str(finding.level)] += 1
            if finding.is_refused:
                refused.append(finding.line(path.name))
    return {"documents": documents, **dict(levels), "refused": refused}


def check_faults(crds: str) -> dict[str, Any]:
    """The outcome of every faulty manifest and spec."""
    *objects, job = render(load_cluster("eks"), load_job(*_STUDY))
    assert check([*objects, job], crds) == []  # so any finding in a case is caused by its fault
    report = {}
    for kind, faults in MANIFESTS.items():
        outcomes = []
        for name, path, value in faults:
            # The other objects stay, since in some faults they do not fit the job.
            outcomes.append((name, worst_level([*objects, changed(job, path, value)], crds)))
        report[kind] = counts(outcomes)
    outcomes = []
    for name, index, path, value in OBJECTS:
        faulty = [*objects]
        faulty[index] = changed(objects[index], path, value)
        outcomes.append((name, worst_level([*faulty, job], crds)))
    report["faulty objects beside the job"] = counts(outcomes)
    report["faulty specs"] = counts((name, check_spec(settings, crds)) for name, settings in SPECS)
    return report


def check_spec(settings: str, crds: str) -> str:
    """The outcome of a faulty spec, which `cluster validate` renders with a recipe."""
    try:
        # Two settings are separated by a space before a name of the spec.
        spec = load_cluster("gke", settings.replace(" training.", "\ntraining.").splitlines())
        job = load_job(*_SPEC_STUDY)
        manifests = render(spec, job)
        warnings = spec_warnings(spec, job)
    except UserError:
        return "error"
    level = worst_level(manifests, crds)
    return "warning" if level == MISSED and warnings else level


def main() -> None:
    """Check samples and faults, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crds", required=True, help="folder with KubeRay's CRDs")
    parser.add_argument("--samples", type=Path, help="folder of manifests of others")
    arguments = parser.parse_args()
    samples = json.loads(REPORT.read_text())["samples"] if REPORT.exists() else []
    if arguments.samples:
        samples.append(check_samples(arguments.samples, arguments.crds))
    faults = check_faults(arguments.crds)
    report = {**circumstances("jsonschema", "pyyaml", "ray"), "samples": samples, "faults": faults}
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"samples": samples, "faults": faults}, indent=2))


if __name__ == "__main__":
    main()
