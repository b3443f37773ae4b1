"""All rules with their levels."""

from collections.abc import Iterator

from ..types import KubeManifest, Level, Violation
from . import interruptions, kuberay, kubernetes, network, objects, pipeline, pod_security, pods
from .fields import Fields, Rule, is_own

ERRORS: tuple[Rule, ...] = (*kubernetes.RULES, *network.RULES, *kuberay.RULES)
# What a study needs: only in manifests that carry the label of this project.
POLICIES: tuple[Rule, ...] = (
    *objects.POLICIES,
    *pipeline.POLICIES,
    *interruptions.POLICIES,
    *pods.POLICIES,
    *pod_security.POLICIES,
)
# Policies here, warnings in manifests of others.
RISKS: tuple[Rule, ...] = (*objects.RISKS, *pod_security.RISKS, *pods.RISKS, *pipeline.RISKS)
WARNINGS: tuple[Rule, ...] = pipeline.WARNINGS


def check_rules(manifest: KubeManifest) -> Iterator[tuple[Level, Violation]]:
    """All violations of one manifest, the worst first."""
    fields = Fields("", manifest)
    own = is_own(fields)
    levels = [(Level.ERROR, ERRORS)]
    if own:
        levels += [(Level.POLICY, (*RISKS, *POLICIES)), (Level.WARNING, WARNINGS)]
    else:
        levels += [(Level.WARNING, RISKS)]
    for level, rules in levels:
        for rule in rules:
            for violation in rule(fields):
                yield level, violation
