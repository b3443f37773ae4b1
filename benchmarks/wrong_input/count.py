"""Count what happens to wrong input: how many cases the tests give to the program, by kind and outcome.

A case is rejected if its test passes, which requires one line that names what is wrong, exit code 2, and nothing left
behind; random cases (of hypothesis) may also be accepted. Where a test fails, its own message says whether there was a
traceback, no message, or a program that did not end. Writes `wrong_input.json`.

Example (three minutes on two cores):
  python -m benchmarks.wrong_input.count
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.circumstances import circumstances

# Kinds of input, and the tests whose cases are wrong input. Whole files of tests also have a few other cases.
KINDS = {
    "settings": [
        "pipelines/test_wrong_input.py::test_settings_are_rejected_with_one_line",
        "pipelines/test_wrong_input.py::test_a_sweep_of_too_many_studies_is_rejected_at_once",
    ],
    "command lines": [
        "pipelines/cli/test_command_line.py::test_main_reports_user_errors_in_one_line",
        "pipelines/cli/test_command_line.py::test_main_rejects_wrong_words_with_one_line",
        "pipelines/cli/test_command_line.py::test_main_names_the_nearest_right_word",
        "pipelines/cli/test_command_line.py::test_dry_run_checks_the_gate",
        "pipelines/stages/test_evaluate.py::test_evaluate_rejects_settings_that_do_not_fit",
        "pipelines/jobs/test_submit.py::test_submit_rejects_what_cannot_work_with_one_line",
    ],
    "environments": [
        "pipelines/test_wrong_input.py::test_environments_are_rejected_with_one_line",
        "pipelines/test_wrong_input.py::test_google_storage_without_a_network_is_rejected_at_once",
        "pipelines/test_wrong_input.py::test_a_silent_server_is_rejected_with_one_line",
    ],
    "rights of files": [
        "pipelines/test_wrong_input.py::test_what_may_not_be_used_is_rejected_with_one_line",
        "pipelines/cli/browse/test_runs_and_compare.py::test_a_run_that_is_empty_or_may_not_be_read_is_rejected",
    ],
    "recipe files": [
        "pipelines/test_wrong_input.py::test_recipes_are_rejected_with_one_line",
        "pipelines/test_wrong_input.py::test_paths_of_recipes_are_rejected_with_one_line",
    ],
    "data files": ["pipelines/test_wrong_input.py::test_data_files_are_rejected_with_one_line"],
    "model folders": ["pipelines/test_wrong_input.py::test_model_folders_are_rejected_with_one_line"],
    "damaged results": ["pipelines/test_corrupt_results.py"],
    "cluster specs": [
        "cluster/test_spec.py::test_load_cluster_rejects_a_wrong_spec_with_one_line",
        "cluster/test_recipe_checks.py::test_check_recipe_rejects_a_recipe_that_cannot_run",
        "pipelines/test_wrong_input.py::test_names_of_cluster_specs_that_are_too_long_are_rejected_with_one_line",
    ],
    "manifests": [
        "cluster/test_rules.py::test_check_reports_an_error",
        "cluster/test_rules.py::test_check_reports_a_broken_policy",
        "cluster/test_rules.py::test_check_reports_a_warning",
        "cluster/test_rules.py::test_check_reports_an_object",
        "cluster/test_rules.py::test_check_reports_a_risk_of_another_project_as_a_warning",
    ],
}


def run(tests: list[str], folder: Path) -> dict[str, float]:
    """The number of cases by outcome of their tests, and the seconds of the longest.

    Raises:
        CalledProcessError: unless all tests were found and ran, whether or not they passed.
    """
    report = folder / "report.xml"
    files = [f"tests/unit/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"--junitxml={report}", *files]
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if done.returncode not in (0, 1):  # 1: a test failed
        done.check_returncode()
    outcomes: Counter[str] = Counter()
    longest = 0.0
    for case in ElementTree.parse(report).iter("testcase"):
        names = {child.tag for child in case}
        outcomes["failed" if names & {"failure", "error"} else "skipped" if "skipped" in names else "refused"] += 1
        longest = max(longest, float(case.get("time", "0")))
    return {**outcomes, "longest_seconds": longest}


def main() -> None:
    """Run the tests of every kind and write the counts."""
    with tempfile.TemporaryDirectory() as folder:
        counts = {kind: run(tests, Path(folder)) for kind, tests in KINDS.items()}
    report = {**circumstances("pydantic", "ray", "transformers"), "cases": counts}
    path = Path(__file__).parent / "wrong_input.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    for kind, outcomes in counts.items():
        print(f"{kind:<22} {outcomes}")


if __name__ == "__main__":
    main()
