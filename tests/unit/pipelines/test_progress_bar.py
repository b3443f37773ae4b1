"""The progress of a run on the terminal."""

import io
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import progress_bar
from pipelines.jobs import follow
from pipelines.progress_bar import RateEstimator, StageProgress, show_progress, show_stage
from pipelines.run_coordinator import RunCoordinator
from pipelines.stages import distill
from pos2distill.store.artifacts import Artifact
from tests.support.coordinator_spec import make_spec


class Scripted:
    """An event that is waited for: each wait takes as long as it says by a clock of its own, and does the next step.

    After the last step it is set.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], None]) -> None:
        self.steps = list(steps)
        self.now = 100.0
        monkeypatch.setattr("pipelines.progress_bar.time.monotonic", lambda: self.now)

    def wait(self, seconds: float) -> bool:
        """As of `threading.Event`."""
        self.now += seconds
        self.steps.pop(0)()
        return not self.steps


@pytest.fixture
def every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh every second, and a line at each."""
    monkeypatch.setattr(progress_bar, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress_bar, "UNCHANGED_LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress_bar, "REFRESH_SECONDS", 1.0)


def nothing() -> None:
    """A second passes."""


def test_rate_is_measured_from_the_first_result_of_this_run() -> None:
    """90 s to start, then 9 each 20 s. The first 9 began before the clock."""
    estimator = RateEstimator(450, done=54)
    estimator.update(54, now=80.0)
    assert estimator.describe(80.0) == "time left unknown"
    estimator.update(63, now=110.0)
    assert estimator.describe(129.0) == "time left unknown"
    estimator.update(72, now=130.0)
    assert estimator.describe(130.0) == "0.45 a second, 14:00 left"  # 378 are left
    # The time of a batch that is under way runs off; a late one makes it slower.
    assert estimator.describe(140.0) == "0.45 a second, 13:50 left"
    assert estimator.describe(150.0) == "0.45 a second, 13:40 left"
    assert estimator.describe(170.0) == "0.23 a second, 27:40 left"


def test_rate_says_nothing_of_what_finished_at_once() -> None:
    estimator = RateEstimator(4, done=0)
    estimator.update(4, now=9.0)
    assert estimator.describe(9.0) == ""


def test_rate_is_unknown_while_restarted_workers_repeat_steps() -> None:
    estimator = RateEstimator(90, done=0)
    for count, now in ((3, 0.0), (6, 6.0), (0, 30.0), (3, 36.0)):
        estimator.update(count, now)
    assert estimator.describe(36.0) == "time left unknown"
    estimator.update(6, 42.0)
    assert estimator.describe(42.0).endswith(" left")


def test_rate_of_a_stage_that_gets_nothing_finished_any_more() -> None:
    """As after the loss of a machine that is not replaced."""
    estimator = RateEstimator(90, done=0)
    estimator.update(3, now=0.0)
    assert estimator.describe(601.0) == "nothing finished for 10:01"
    estimator.update(6, now=610.0)
    assert not estimator.is_stalled(610.0 + 5 * 610.0), "results may take as long as this"
    assert estimator.describe(610.0 + 5 * 610.0 + 1) == "nothing finished for 50:51"
    estimator.update(90, now=5000.0)
    assert not estimator.is_stalled(9000.0)


def test_rate_of_a_stage_whose_results_do_not_count() -> None:
    """As wrong answers: the samplers work, although no more samples are kept."""
    estimator = RateEstimator(90, done=0)
    estimator.update(3, now=0.0)
    estimator.update(3, now=700.0, idle_seconds=5.0)
    assert estimator.describe(700.0) == "time left unknown"
    estimator.update(3, now=1300.0, idle_seconds=605.0)
    assert estimator.describe(1300.0) == "nothing finished for 10:05"


@pytest.mark.usefixtures("every_second")
@pytest.mark.parametrize("show", [progress_bar.show_lines, progress_bar.show_bar])
def test_progress_hints_at_what_is_waited_for(
    show: Callable[[object, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing begins."""
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_bar, "STALLED_SECONDS", 2.0)
    script = Scripted(monkeypatch)
    coordinator = RunCoordinator(make_spec(total=6))
    script.steps = [nothing, nothing, nothing, lambda: coordinator.report_step(2, 1, 0.5), *[nothing] * 4]
    show(progress_bar.run_display(coordinator.spec, coordinator.read, "look there"), script)
    drawn = [line for line in re.split(r"[\r\n]", terminal.getvalue()) if "samples" in line and "; " in line]
    hinted = ["look there" in line for line in drawn[:8]]
    assert hinted == [False, False, True, False, False, False, True, True]


def test_resumed_run_says_at_which_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = Artifact(str(tmp_path), "checkpoint", "feed")
    spec = make_spec(total=20)
    assert distill.resumed_spec(spec, checkpoint) is spec  # it has made no step
    step = {"epoch": 0, "examples": ["e0"], "rows": 4, "loss": 0.5, "loss_trivial": 0.5, "loss_anchor": None}
    step |= {"weight_by_slot": {}, "grad_norm": 1.0, "learning_rate": 1e-3}
    lines = [json.dumps({**step, "step": number, "fraction": (number + 1) / 8}) for number in range(2)]
    folder = tmp_path / "checkpoint-feed" / "steps"
    folder.mkdir(parents=True)
    (folder / "00000.jsonl").write_text("\n".join(lines) + "\n")
    assert distill.resumed_spec(spec, checkpoint) is spec  # its state was deleted, so it begins again
    assert capsys.readouterr().err == ""
    checkpoint.fs.makedirs(f"{checkpoint.path}/training/local/00000002-abcd")
    checkpoint.write_json("training/local/latest.json", ["00000002-abcd"])
    assert distill.resumed_spec(spec, checkpoint).trained == 5
    assert capsys.readouterr().err == "distill: resuming at step 2 of about 8\n"
    # The upload of a state at step 4 was cut off, after the records of its steps had been written.
    later = [json.dumps({**step, "step": number, "fraction": (number + 1) / 8}) for number in (2, 3)]
    (folder / "00002.jsonl").write_text("\n".join(later) + "\n")
    assert distill.resumed_spec(spec, checkpoint).trained == 5
    assert len(distill.read_logged_steps(checkpoint)) == 2


@pytest.mark.usefixtures("every_second")
def test_lines_of_training(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = RunCoordinator(make_spec(total=6, stored={"kept": 3}))
    script = Scripted(
        monkeypatch,
        nothing,
        lambda: coordinator.heartbeat("samplers", "a"),
        lambda: coordinator.report_step(2, 1, 0.5),
        nothing,
        lambda: coordinator.report_step(4, 2, 0.5),
        lambda: coordinator.report_step(6, 3, 0.5),
    )
    progress_bar.show_lines(progress_bar.run_display(coordinator.spec, coordinator.read), script)
    trained, rest = "samples trained on (all epochs)", "sampled 3, kept 3"
    assert capsys.readouterr().err.splitlines() == [
        f"distill: 0 of 6 {trained}; starting processes and loading models, 1 s so far; {rest}",
        f"distill: 0 of 6 {trained}; time left unknown; {rest}, samplers 1",
        f"distill: 2 of 6 {trained}; time left unknown; {rest}, samplers 1, step 1, loss 0.5000",
        f"distill: 2 of 6 {trained}; time left unknown; {rest}, samplers 1, step 1, loss 0.5000",
        f"distill: 4 of 6 {trained}; 1.00 a second, 00:02 left; {rest}, samplers 1, step 2, loss 0.5000",
        f"distill: 6 of 6 {trained}; 1.33 a second, 00:00 left; {rest}, samplers 1, step 3, loss 0.5000",
    ]


def test_unchanged_line_keeps_the_log_of_a_job_open() -> None:
    """A connection without lines for longer is taken for a dead one."""
    assert progress_bar.UNCHANGED_LINE_SECONDS + progress_bar.REFRESH_SECONDS < follow._QUIET_SECONDS / 1.5


def test_unchanged_line_is_repeated_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "REFRESH_SECONDS", 11.0)
    stage = StageProgress(done=0)
    display = progress_bar.ProgressDisplay("evaluate base", 6, 0, "prompts", stage.figures)
    progress_bar.show_lines(display, Scripted(monkeypatch, *[nothing] * 5, lambda: stage.update(1), nothing))
    waiting = "evaluate base: 0 of 6 prompts; loading models, then the first batch"
    assert capsys.readouterr().err.splitlines() == [
        f"{waiting}, 11 s so far",
        f"{waiting}, 44 s so far",
        "evaluate base: 1 of 6 prompts; time left unknown",
    ]


@pytest.mark.usefixtures("every_second")
def test_bar_of_a_resumed_run_begins_where_the_run_before_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn at every refresh, also while there is no result."""
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    coordinator = RunCoordinator(replace(make_spec(total=90), trained=45))
    steps = [lambda count=count: coordinator.report_step(count, count // 3, 0.5) for count in (48, 48, 51, 51)]
    script = Scripted(monkeypatch, nothing, *steps)
    progress_bar.show_bar(progress_bar.run_display(coordinator.spec, coordinator.read), script)
    drawn = [line for line in terminal.getvalue().split("\r") if ", " in line]
    states = [
        re.sub(r".*\| (\d+/90 samples) trained on \(all epochs\) \[[\d:]+, (.*?)[;\]].*", r"\1, \2", line.strip())
        for line in drawn
    ]
    assert states[:5] == [
        "45/90 samples, starting processes and loading models",
        "48/90 samples, time left unknown",
        "48/90 samples, time left unknown",
        "51/90 samples, 1.50 a second, 00:26 left",  # 39 are left
        "51/90 samples, 1.50 a second, 00:25 left",
    ]


def test_show_progress_shows_the_last_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "LINE_SECONDS", 0.0)
    coordinator = RunCoordinator(make_spec(total=4))
    with show_progress(coordinator.spec, coordinator.read):
        coordinator.report_step(4, 2, 0.4)
    (*_, last) = capsys.readouterr().err.splitlines()
    assert last == "distill: 4 of 4 samples trained on (all epochs); sampled 0, kept 0, step 2, loss 0.4000"


@pytest.mark.usefixtures("every_second")
def test_lines_of_a_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stage = StageProgress(done=1)
    display = progress_bar.ProgressDisplay("evaluate base", 6, 1, "prompts", stage.figures)
    script = Scripted(monkeypatch, nothing, lambda: stage.update(2, "best 0.5"), lambda: stage.update(2, "best 0.5"))
    progress_bar.show_lines(display, script)
    assert capsys.readouterr().err.splitlines() == [
        "evaluate base: 1 of 6 prompts; loading models, then the first batch, 1 s so far",
        "evaluate base: 3 of 6 prompts; time left unknown; best 0.5",
        "evaluate base: 5 of 6 prompts; 2.00 a second, 00:00 left; best 0.5",
    ]


def test_show_stage_hints_at_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LINE_SECONDS", "STALLED_SECONDS"):
        monkeypatch.setattr(progress_bar, name, -1.0)
    with show_stage("evaluate base", 4, done=0, unit="prompt", hint="look there"):
        pass
    assert capsys.readouterr().err.endswith("0 s so far; look there\n")


def test_show_stage_is_silent_if_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_bar, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress_bar, "_quiet", threading.Event())  # restored after the test
    for lines in (1, 0):
        with show_stage("evaluate base", 4, done=0, unit="prompt", hint="") as stage:
            stage.update(4)
        assert len(capsys.readouterr().err.splitlines()) == lines
        progress_bar.set_quiet()


@pytest.mark.parametrize(("is_terminal", "lines"), [(True, ["checking True"]), (False, [])])
def test_show_activity_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool, lines: list[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(progress_bar, "_quiet", threading.Event())  # restored after the test
    for _ in range(2):  # as for two studies of a sweep
        progress_bar.show_activity(f"checking {is_terminal}")
    assert capsys.readouterr().err.splitlines() == lines
    progress_bar.set_quiet()
    progress_bar.show_activity(f"checking again {is_terminal}")
    assert capsys.readouterr().err == ""
