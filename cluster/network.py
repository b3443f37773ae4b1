"""The section `network` of the cluster spec: which connections from and to the pods are allowed."""

import ipaddress
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from pos2distill.config import Section

from .sections import Namespace
from .syntax import check_labels


def _check_cidr(field: str, cidr: str) -> None:
    try:
        network = ipaddress.ip_network(cidr)
    except ValueError:
        network = None
    # Kubernetes takes neither a single address nor a netmask.
    if network is None or not re.search(r"/[0-9]{1,3}$", cidr):
        raise ValueError(f"{field}: expected a network, for example 10.0.0.0/16, got {cidr}")


def _is_address(host: str) -> bool:
    """Whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _may_be_in_cluster(host: str) -> bool:
    """Whether a host may be a Service: `minio`, `minio.storage`, `minio.storage.svc...`, or a private address."""
    if _is_address(host):
        return ipaddress.ip_address(host).is_private
    return host.count(".") <= 1 or ".svc" in host


class EgressRule(Section):
    """What pods may connect to, apart from the pods of the same cluster: addresses, or the pods of a namespace."""

    cidr: str | None = Field(None, description="IP addresses in CIDR notation, for example 0.0.0.0/0 or 10.0.20.15/32.")
    namespace: Namespace | None = Field(
        None, description="Set this instead of `cidr` for pods: Cilium does not apply ranges of addresses to pods."
    )
    ports: tuple[int, ...] = Field(
        (443,),
        min_length=1,
        description="Allowed ports. For a Service, the ports of its pods, which may differ from its own.",
    )
    protocol: Literal["TCP", "UDP"] = Field("TCP", description="Transport protocol of the ports.")

    @model_validator(mode="after")
    def _check_peer(self) -> "EgressRule":
        if (self.cidr is None) == (self.namespace is None):
            raise ValueError("cidr: set either cidr or namespace")
        if self.cidr is not None:
            _check_cidr("cidr", self.cidr)
        for port in self.ports:
            if not 0 < port < 65536:
                raise ValueError(f"ports: {port} is not a valid port; expected 1 to 65535")
        return self

    def covers(self, address: str | None) -> bool:
        """Whether this is a rule for addresses that includes this address; None: any address."""
        if self.cidr is None or address is None:
            return self.cidr is not None
        return ipaddress.ip_address(address) in ipaddress.ip_network(self.cidr)


class NetworkSection(Section):
    """Which connections from and to the pods are allowed. All others are denied."""

    operator_namespace: Namespace = Field(
        "kuberay-operator",
        description="Namespace of KubeRay's operator, which requests the job's status from the head.",
    )
    metrics_namespace: Namespace | None = Field(
        None, description="Namespace of the Prometheus that may scrape the pods' metrics. Default: none may."
    )
    dns: tuple[str, ...] = Field(
        ("169.254.20.10/32",),
        description="Addresses of DNS caches on nodes, in CIDR notation. The DNS of kube-system is always allowed.",
    )
    pod_monitor: dict[str, str] | None = Field(
        None,
        description="Labels by which a Prometheus operator selects its PodMonitors, for example {release: prometheus}. "
        "Default: no PodMonitor.",
    )
    api_server: EgressRule = Field(
        EgressRule(cidr="0.0.0.0/0", ports=(443, 6443)),
        description="Address of the Kubernetes API, for the autoscaler on the head.",
    )
    egress: tuple[EgressRule, ...] = Field(
        (EgressRule(cidr="0.0.0.0/0", ports=(443,)),),
        description="Destinations that the pods may connect to: storage, model hub, trackers and the cloud's identity "
        "service.",
    )

    def allows_port(self, port: int, address: str | None = None) -> bool:
        """Whether a rule for addresses allows a port: of this address, or of any."""
        rules = [rule for rule in self.egress if rule.protocol == "TCP" and port in rule.ports]
        return any(rule.covers(address) for rule in rules)

    def may_allow(self, host: str, port: int) -> bool:
        """Whether a rule may allow this port of a host."""
        if self.allows_port(port, host if _is_address(host) else None):
            return True
        has_namespaces = any(rule.protocol == "TCP" and rule.namespace is not None for rule in self.egress)
        return has_namespaces and _may_be_in_cluster(host)

    @field_validator("pod_monitor")
    @classmethod
    def _check_pod_monitor(cls, labels: dict[str, str] | None) -> dict[str, str] | None:
        check_labels(labels or {})
        return labels

    @model_validator(mode="after")
    def _check_dns_and_monitor(self) -> "NetworkSection":
        for cidr in self.dns:
            _check_cidr("dns", cidr)
        if self.api_server.cidr is None or self.api_server.protocol != "TCP":
            raise ValueError("api_server: expected a cidr with the address of the Kubernetes API, by TCP")
        if self.pod_monitor is not None and self.metrics_namespace is None:
            raise ValueError("pod_monitor: set metrics_namespace too, from which Prometheus may reach the pods")
        return self
