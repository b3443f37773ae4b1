"""What a study needs of the objects beside its cluster: labels that select its pods, and connections that it uses."""

from collections.abc import Iterator
from typing import Any

from pos2distill.errors import did_you_mean

from ..names import GROUP_LABEL, INSTANCE_LABEL, NODE_TYPE_LABEL, PART_OF_LABEL
from ..syntax import SHOWN
from ..types import Violation
from .fields import RAY_API, Fields, Rule, templates_of

API_VERSIONS = {
    "RayJob": RAY_API,
    "RayCluster": RAY_API,
    "ServiceAccount": "v1",
    "ConfigMap": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
}
_SELECTING_KINDS = ("NetworkPolicy", "PodDisruptionBudget")
_PROTECTED = ((NODE_TYPE_LABEL, "head"), (GROUP_LABEL, "training"))
_ALL_ADDRESSES = ("0.0.0.0/0", "::/0")
_DNS_PORT = 53


def kind_is_rendered(manifest: Fields) -> Iterator[Violation]:
    """This project renders seven kinds; another kind with its label is misspelled."""
    kind, api_version = manifest.text("kind"), manifest.text("apiVersion")
    if kind not in API_VERSIONS:
        yield manifest.violation(
            "kind", f"'{kind[:SHOWN]}' is not rendered here{did_you_mean(kind[:SHOWN], API_VERSIONS)}"
        )
    elif api_version != API_VERSIONS[kind]:
        message = f"is '{api_version[:SHOWN]}', but {kind} is served as {API_VERSIONS[kind]}; set that"
        yield manifest.violation("apiVersion", message)


def version_has_all_fields(manifest: Fields) -> Iterator[Violation]:
    """KubeRay 1.7 serves v1alpha1 too, without the fields that v1 gained since 2023 (ray-project/kuberay#5122)."""
    if manifest.text("apiVersion") == "ray.io/v1alpha1":
        kind = manifest.text("kind")[:SHOWN]
        message = f"is 'ray.io/v1alpha1', but {kind} is served as ray.io/v1; set that, or newer fields are dropped"
        yield manifest.violation("apiVersion", message)


def pods_carry_the_labels(manifest: Fields) -> Iterator[Violation]:
    """Network policies and disruption budgets find the pods by these labels."""
    for template in templates_of(manifest):
        yield from _missing_labels(template.mapping("metadata", "labels"), manifest)


def selector_matches_the_pods(manifest: Fields) -> Iterator[Violation]:
    """A policy or budget that selects nothing has no effect."""
    if manifest.get("kind") not in _SELECTING_KINDS:
        return
    field = "podSelector" if manifest.get("kind") == "NetworkPolicy" else "selector"
    labels = manifest.mapping("spec", field, "matchLabels")
    yield from _missing_labels(labels, manifest)
    for name in labels.values:
        if name not in (PART_OF_LABEL, INSTANCE_LABEL, NODE_TYPE_LABEL, GROUP_LABEL):
            yield labels.violation(name, "no pod carries this label; remove it")


def _missing_labels(labels: Fields, manifest: Fields) -> Iterator[Violation]:
    own = manifest.mapping("metadata", "labels")
    for name in (PART_OF_LABEL, INSTANCE_LABEL):
        if name not in own:
            yield own.violation(name, "missing; set the name of the cluster")
        elif labels.get(name) != own.get(name):
            yield labels.violation(name, f"is not that of the object; set {own.text(name)[:SHOWN]}")


def budget_protects_what_may_not_be_drained(manifest: Fields) -> Iterator[Violation]:
    """Nodes for sampling may be drained at any time; a budget for them would only delay it."""
    spec = manifest.mapping("spec")
    labels = spec.mapping("selector", "matchLabels")
    if manifest.get("kind") != "PodDisruptionBudget":
        return
    if not any(labels.get(name) == value for name, value in _PROTECTED):
        yield labels.violation(GROUP_LABEL, "only the head and training are protected from drains; set training")
    if not spec.get("minAvailable"):
        yield spec.violation("minAvailable", "missing: all pods may be drained; set their number")


def policy_restricts_connections(manifest: Fields) -> Iterator[Violation]:
    """A rule without peers allows everything. Only rules for a group of addresses or pods are rendered.

    Egress to every address is rendered too, limited to ports, since a bucket has no fixed address.
    """
    spec = manifest.mapping("spec")
    if manifest.get("kind") != "NetworkPolicy":
        return
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        if direction.capitalize() not in spec.items_of("policyTypes"):
            yield spec.violation("policyTypes", f"{direction} is not restricted; add {direction.capitalize()}")
        for index, rule in enumerate(spec.items_of(direction)):
            if isinstance(rule, dict) and not rule.get(peers):
                yield Violation(f"spec.{direction}[{index}]", f"allows every address; set {peers}")
    for rule in spec.mappings("ingress"):
        for peer in rule.mappings("from"):
            if peer.mapping("ipBlock").get("cidr") in _ALL_ADDRESSES:
                yield peer.violation("ipBlock.cidr", "allows every address; name those that need access")
            if peer.get("namespaceSelector") == {} and not peer.mapping("podSelector"):
                yield peer.violation("namespaceSelector", "allows every pod of the cluster; name a namespace")
    for rule in spec.mappings("egress"):
        blocks = [peer.mapping("ipBlock").get("cidr") for peer in rule.mappings("to")]
        if not rule.mappings("ports") and any(block in _ALL_ADDRESSES for block in blocks):
            yield rule.violation("ports", "missing: allows every port of every address; set for example 443")


def policy_allows_what_ray_needs(manifest: Fields) -> Iterator[Violation]:
    """The policy for all pods must allow the pods of the cluster to each other, and names to be looked up."""
    spec = manifest.mapping("spec")
    selected = spec.mapping("podSelector", "matchLabels")
    # The policy for the head adds to the one for all pods.
    if manifest.get("kind") != "NetworkPolicy" or NODE_TYPE_LABEL in selected or GROUP_LABEL in selected:
        return
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        rules = spec.mappings(direction)
        if not any(_allows_pods(peer, selected) for rule in rules for peer in rule.mappings(peers)):
            yield spec.violation(direction, "the cluster's pods cannot reach each other; add their labels")
    ports = [port.get("port") for rule in spec.mappings("egress") for port in rule.mappings("ports")]
    if _DNS_PORT not in ports:
        yield spec.violation("egress", f"names cannot be looked up; allow port {_DNS_PORT}")


def _allows_pods(peer: Fields, selected: Fields) -> bool:
    labels: dict[str, Any] = peer.mapping("podSelector", "matchLabels").values
    # Pods of other namespaces are other pods.
    return "podSelector" in peer and "namespaceSelector" not in peer and labels.items() <= selected.values.items()


RISKS: tuple[Rule, ...] = (version_has_all_fields,)
POLICIES: tuple[Rule, ...] = (
    kind_is_rendered,
    pods_carry_the_labels,
    selector_matches_the_pods,
    budget_protects_what_may_not_be_drained,
    policy_restricts_connections,
    policy_allows_what_ray_needs,
)
