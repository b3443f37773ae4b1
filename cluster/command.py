"""`run.py cluster`: run one action on a cluster spec, a recipe and their overrides."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pos2distill.config import Recipe
from pos2distill.config.gate import NO_GATE, Gate
from pos2distill.config.validation import dotted_names
from pos2distill.errors import ExitCode, UserError, one_line

from . import rayjob
from .job_command import load_job
from .kubectl import dry_run
from .render import render, to_yaml
from .spec import ClusterSpec, load_cluster
from .spec_warnings import spec_warnings
from .status import status
from .types import KubeManifest, Level, Outcome
from .validate import CHECKED_KINDS, Finding, check, load_manifests

_SPEC_PREFIX = "spec."


def run_cluster(
    action: str,
    source: str,
    words: Sequence[str],
    *,
    command: str = "study",
    gate: Gate = NO_GATE,
    out: str | None = None,
    crds: str | None = None,
    server: bool = False,
) -> Outcome:
    """Run one action.

    Args:
        action: render, validate, submit, status, logs or delete.
        source: a cluster spec; for validate, also a file of manifests.
        words: a recipe, its overrides, and `spec.section.field=value` for the spec.
        command: the `run.py` command that the job runs.
        gate: its options.
        out: for render, a folder in which NAME.yaml is written; None: print the manifests.
        crds: for what checks manifests (render, validate, submit), a file or folder with KubeRay's CRDs.
        server: for the same, also ask the cluster that kubectl is configured for, which applies nothing.
    Raises:
        UserError: for a spec or recipe that cannot be used.
    """
    for word in words:
        if word.partition("=")[0].strip() == "spec" and "=" in word:
            raise UserError(f"{word}: expected spec.section.field=value")
    if action == "status":
        return status(_load_spec_alone(action, source, words))
    if action == "logs":
        return Outcome(rayjob.logs(_load_spec_alone(action, source, words)))
    if action == "delete":
        return Outcome(rayjob.delete(_load_spec_alone(action, source, words)))
    if action == "submit" and _split_words(words)[0] is None:
        raise UserError("submit: expected a recipe; for a cluster without a job, use `render` and kubectl apply")

    # Every other action checks its manifests first, so that nothing invalid is printed, written or applied.
    loaded = _load_manifests(action, source, words, command, gate)
    manifests = loaded.manifests
    findings = _check(source, manifests, loaded.warnings, crds=crds, server=server)
    is_refused = any(finding.is_refused for finding in findings)
    exit_code = ExitCode.USER_ERROR if is_refused else ExitCode.SUCCESS
    if action == "render":
        if not is_refused:
            _write(manifests, out)
        return Outcome(exit_code)
    if action == "submit" and not is_refused:
        assert loaded.spec is not None  # manifests in a file are only validated
        return rayjob.submit(loaded.spec, manifests)
    if not is_refused:
        _report(manifests, crds=crds, server=server)
    return Outcome(exit_code, _summary(manifests, findings, exit_code))


def _check(
    source: str, manifests: Sequence[KubeManifest], warnings: Sequence[str], *, crds: str | None, server: bool
) -> list[Finding]:
    """Print the findings in manifests, and return them.

    Args:
        warnings: about the spec that they were rendered from.
    """
    findings = [Finding(Level.WARNING, None, None, None, warning) for warning in warnings]
    findings += check(manifests, crds)
    # The findings so far are printed before the server is asked, because it may take a while to answer.
    for finding in findings:
        print(finding.line(source), file=sys.stderr)
    if server:
        rejections = [Finding(Level.ERROR, None, None, None, line) for line in dry_run(to_yaml(manifests))]
        for finding in rejections:
            print(finding.line(source), file=sys.stderr)
        findings += rejections
    return findings


def _summary(manifests: Sequence[KubeManifest], findings: Sequence[Finding], exit_code: ExitCode) -> dict[str, Any]:
    """What `--json` prints of checked manifests."""
    reported = [finding.summary() for finding in findings]
    return {"manifests": len(manifests), "findings": reported, "exit_code": exit_code}


def _report(manifests: Sequence[KubeManifest], *, crds: str | None, server: bool) -> None:
    """Print what was checked, and what was not."""
    checked = "schema and rules" if crds else "rules only; to check the schema too, set --crds"
    if server:
        checked += ", and the server accepts them"
    kinds = {(str(manifest["apiVersion"]), str(manifest["kind"])) for manifest in manifests}
    other_kinds = sorted({one_line(f"{kind} ({version})") for version, kind in kinds - set(CHECKED_KINDS)})
    if other_kinds:
        checked += f"; of {', '.join(other_kinds)}, the metadata only"
    print(f"{len(manifests)} manifests are valid ({checked})")


def _write(manifests: Sequence[KubeManifest], out: str | None) -> None:
    """Write manifests to a file in a folder; None: print them."""
    if out is None:
        print(to_yaml(manifests), end="")
        return
    folder = Path(out)
    # The last manifest is the job or the cluster; the others have suffixes after its name.
    path = folder / f"{manifests[-1]['metadata']['name']}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(manifests), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: cannot write {path} ({error.strerror}); choose another folder") from None
    print(path)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Manifests, and the spec that they were rendered from with warnings about it; None if a file contains them."""

    manifests: list[KubeManifest]
    spec: ClusterSpec | None = None
    warnings: Sequence[str] = ()


def _load_manifests(action: str, source: str, words: Sequence[str], command: str, gate: Gate) -> _Loaded:
    """The manifests in a file (validate only), or those that a spec and its recipe are rendered to."""
    if action == "validate" and os.path.isfile(source):  # Path raises an error for a name that is too long
        manifests = load_manifests(Path(source))
        if manifests is not None:
            if words:
                raise UserError(f"{words[0]}: {source} contains manifests, which take no recipe and no overrides")
            return _Loaded(manifests)
    recipe, overrides = _split_words(words)
    spec = _load_spec(source, words)
    job = None if recipe is None else load_job(recipe, overrides, command=command, gate=gate)
    return _Loaded(render(spec, job), spec, spec_warnings(spec, job))


def _load_spec(source: str, words: Sequence[str]) -> ClusterSpec:
    overrides = [word.strip().removeprefix(_SPEC_PREFIX) for word in words if _is_of_spec(word)]
    return load_cluster(source, overrides, prefix=_SPEC_PREFIX)


def _load_spec_alone(action: str, source: str, words: Sequence[str]) -> ClusterSpec:
    """The spec of an action that finds its objects by the spec's name, so no other words are allowed.

    Raises:
        UserError: naming a word that is not a setting of the spec.
    """
    others = [word for word in words if not _is_of_spec(word)]
    if others:
        hint = f"; to change the spec, write spec.{others[0]}" if "=" in others[0] else ""
        raise UserError(f"{others[0]}: cluster {action} takes only a spec and its settings{hint}")
    return _load_spec(source, words)


def _split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, or None if the words name none, and its overrides."""
    recipe = None
    if words and "=" not in words[0]:
        recipe, words = words[0], words[1:]
    overrides = [word for word in words if not _is_of_spec(word)]
    if recipe is None and overrides:
        raise UserError(
            f"{overrides[0]}: expected the recipe before all settings; to change the spec, write spec.{overrides[0]}"
        )
    of_spec_alone = {*dotted_names(ClusterSpec)} - {*dotted_names(Recipe)}
    for override in overrides:
        if override.partition("=")[0].strip() in of_spec_alone:
            raise UserError(f"{override}: is a setting of the spec; write spec.{override}")
    return recipe, overrides


def _is_of_spec(word: str) -> bool:
    return word.lstrip().startswith(_SPEC_PREFIX)
