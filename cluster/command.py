"""`run.py cluster`: run one action on a cluster spec, a recipe and their overrides."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pos2distill.errors import ExitCode, UserError, one_line
from pos2distill.secrets import mask_secrets

from . import rayjob
from .kubectl import dry_run
from .render import render, to_yaml
from .spec import ClusterSpec, load_cluster
from .spec_warnings import spec_warnings
from .types import KubeManifest, Level, Outcome
from .validate import CHECKED_KINDS, check, load_manifests

_SPEC_PREFIX = "spec."


def run_cluster(
    action: str,
    source: str,
    words: Sequence[str],
    *,
    out: str | None = None,
    crds: str | None = None,
    server: bool = False,
) -> Outcome:
    """Run one action.

    Args:
        action: render, validate, submit, status, logs or delete.
        source: a cluster spec; for validate, also a file of manifests.
        words: a recipe, its overrides, and `spec.section.field=value` for the spec.
        out: for render, a folder in which NAME.yaml is written; None: print the manifests.
        crds: for validate, a file or folder with KubeRay's CRDs.
        server: for validate, also ask the cluster that kubectl is configured for, which applies nothing.
    Raises:
        UserError: for a spec or recipe that cannot be used.
    """
    if action == "status":
        return rayjob.status(_load_spec(source, words))
    if action == "logs":
        return Outcome(rayjob.logs(_load_spec(source, words)))
    if action == "delete":
        return Outcome(rayjob.delete(_load_spec(source, words)))
    if action == "submit" and _split_words(words)[0] is None:
        raise UserError("submit: expected a recipe; for a cluster without a job, use `render` and kubectl apply")

    # Every action checks its manifests first, so that nothing invalid is printed, written or applied.
    manifests, warnings = _load_manifests(action, source, words)
    for warning in warnings:
        _print_finding(Level.WARNING, source, warning)
    findings = check(manifests, crds)
    for finding in findings:
        print(finding.line(source), file=sys.stderr)
    refusals = dry_run(to_yaml(manifests)) if server else []
    for line in refusals:
        _print_finding(Level.ERROR, source, line)

    exit_code = ExitCode.SUCCESS
    if refusals or any(finding.is_refused for finding in findings):
        exit_code = ExitCode.USER_ERROR
    elif action == "submit":
        return rayjob.submit(_load_spec(source, words), manifests)
    elif action == "validate":
        _report(manifests, crds=crds, server=server)
    elif out is None:
        print(to_yaml(manifests), end="")
    else:
        _write(manifests, Path(out))
    reported = [
        *(_summary(Level.WARNING, warning) for warning in warnings),
        *(
            _summary(found.level, found.message, document=found.document, object=found.title, field=found.path)
            for found in findings
        ),
        *(_summary(Level.ERROR, line) for line in refusals),
    ]
    return Outcome(exit_code, {"manifests": len(manifests), "findings": reported, "exit_code": exit_code})


def _summary(level: Level, message: str, **where: int | str) -> dict[str, Any]:
    """A finding as `--json` prints it. where: what is known of its document, object and field."""
    entry: dict[str, Any] = {"level": level, "document": None, "object": None, "field": None, "message": message}
    for name, value in {**entry, **where}.items():
        entry[name] = one_line(mask_secrets(value)) if isinstance(value, str) else value
    return entry


def _print_finding(level: Level, source: str, message: str) -> None:
    print(one_line(mask_secrets(f"{level}: {source}: {message}")), file=sys.stderr)


def _report(manifests: Sequence[KubeManifest], *, crds: str | None, server: bool) -> None:
    """Print what was checked, and what was not."""
    checked = "schema and rules" if crds else "rules only; to check the schema too, set --crds"
    if server:
        checked += ", and the server accepts them"
    other_kinds = sorted({str(manifest["kind"]) for manifest in manifests} - set(CHECKED_KINDS))
    if other_kinds:
        checked += f"; of {', '.join(other_kinds)}, the metadata only"
    print(f"{len(manifests)} manifests are valid ({checked})")


def _write(manifests: Sequence[KubeManifest], folder: Path) -> None:
    # The last manifest is the job or the cluster; the others have suffixes after its name.
    path = folder / f"{manifests[-1]['metadata']['name']}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(to_yaml(manifests))
    except OSError as error:
        raise UserError(f"--out: cannot write {path} ({error.strerror}); choose another folder") from None
    print(path)


def _load_manifests(action: str, source: str, words: Sequence[str]) -> tuple[list[KubeManifest], list[str]]:
    """The manifests in a file (validate only), or those that a spec and its recipe are rendered to, with warnings."""
    if action == "validate" and Path(source).is_file():
        manifests = load_manifests(Path(source))
        if manifests is not None:
            if words:
                raise UserError(f"{words[0]}: {source} contains manifests, which take no recipe and no overrides")
            return manifests, []
    recipe, overrides = _split_words(words)
    spec = _load_spec(source, words)
    return render(spec, recipe, overrides), spec_warnings(spec, recipe, overrides)


def _load_spec(source: str, words: Sequence[str]) -> ClusterSpec:
    overrides = [word.removeprefix(_SPEC_PREFIX) for word in words if word.startswith(_SPEC_PREFIX)]
    return load_cluster(source, overrides, prefix=_SPEC_PREFIX)


def _split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, or None if the words name none, and its overrides."""
    recipe = None
    if words and "=" not in words[0]:
        recipe, words = words[0], words[1:]
    overrides = [word for word in words if not word.startswith(_SPEC_PREFIX)]
    if recipe is None and overrides:
        raise UserError(f"{overrides[0]}: expected a recipe first; to change the spec, write spec.{overrides[0]}")
    return recipe, overrides
