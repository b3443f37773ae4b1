"""What the API server rejects in a NetworkPolicy.

Source: ValidateNetworkPolicySpec, ValidateNetworkPolicyPort and ValidateIPBlock of Kubernetes 1.34
(pkg/apis/networking/validation).
"""

import ipaddress
import re
from collections.abc import Iterator

from pos2distill.errors import did_you_mean

from ..syntax import SHOWN
from ..types import Violation
from .fields import Fields, Rule

PROTOCOLS = ("TCP", "UDP", "SCTP")
LARGEST_PORT = 65535
_PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
_CIDR = re.compile(r"[^/]+/[0-9]{1,3}")  # the API server takes no netmasks and no single addresses
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def ports_are_valid(manifest: Fields) -> Iterator[Violation]:
    """A number, or the name of a container's port."""
    for rule, _ in _rules(manifest):
        for port in rule.mappings("ports"):
            yield from check_protocol(port)
            number, name, last = port.integer("port"), port.text("port"), port.integer("endPort")
            if number is not None:
                yield from check_port(port, "port")
            elif name and not _PORT_NAME.fullmatch(name):
                yield port.violation("port", f"'{name[:SHOWN]}' is not a valid port name; set a number from 1 to 65535")
            if last is not None and number is None:
                yield port.violation("endPort", "requires a number as port; set it, or remove endPort")
            elif last is not None and number is not None and not number <= last <= LARGEST_PORT:
                yield port.violation("endPort", f"is {last}; set a number from {number} to {LARGEST_PORT}")


def addresses_are_valid(manifest: Fields) -> Iterator[Violation]:
    """A peer is a block of addresses, or chosen by selectors, not both."""
    for rule, peers in _rules(manifest):
        for peer in rule.mappings(peers):
            selectors = [name for name in ("podSelector", "namespaceSelector") if name in peer]
            if "ipBlock" not in peer:
                if not selectors:
                    yield Violation(peer.path, "names nobody; set podSelector, namespaceSelector or ipBlock")
                continue
            if selectors:
                yield peer.violation(selectors[0], "is not supported together with ipBlock; use two peers")
            yield from _check_block(peer.mapping("ipBlock"))


def _rules(manifest: Fields) -> Iterator[tuple[Fields, str]]:
    """Every rule of a policy, and the field with its peers."""
    if manifest.get("kind") == "NetworkPolicy":
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for rule in manifest.mapping("spec").mappings(direction):
                yield rule, peers


def _check_block(block: Fields) -> Iterator[Violation]:
    network = _network(block.text("cidr"))
    if network is None:
        message = f"'{block.text('cidr')[:SHOWN]}' is not a valid CIDR block; set for example 10.0.0.0/16"
        yield block.violation("cidr", message)
    for index, text in enumerate(block.items_of("except")):
        excepted = _network(text) if isinstance(text, str) else None
        if excepted is None:
            yield block.violation(f"except[{index}]", "is not a valid CIDR block; set for example 10.1.0.0/16")
        elif network is not None and not _is_inside(excepted, network):
            yield block.violation(f"except[{index}]", f"must be a smaller part of {block.text('cidr')}; remove it")


def _network(text: str) -> _Network | None:
    if not _CIDR.fullmatch(text):
        return None
    try:
        return ipaddress.ip_network(text, strict=False)  # the API server ignores the bits of the host
    except ValueError:
        return None


def _is_inside(inner: _Network, outer: _Network) -> bool:
    # Networks of different versions cannot be compared.
    if isinstance(inner, ipaddress.IPv4Network) and isinstance(outer, ipaddress.IPv4Network):
        return inner != outer and inner.subnet_of(outer)
    if isinstance(inner, ipaddress.IPv6Network) and isinstance(outer, ipaddress.IPv6Network):
        return inner != outer and inner.subnet_of(outer)
    return False


# --- Also for the ports of containers


def check_port(port: Fields, name: str) -> Iterator[Violation]:
    """The number in a field. Source: IsValidPortNum of Kubernetes."""
    number = port.integer(name)
    if number is not None and not 0 < number <= LARGEST_PORT:
        yield port.violation(name, f"is {number}; set a number from 1 to {LARGEST_PORT}")


def check_protocol(port: Fields) -> Iterator[Violation]:
    """Source: ValidateNetworkPolicyPort and validateContainerPorts of Kubernetes."""
    protocol = port.text("protocol")
    if protocol and protocol not in PROTOCOLS:
        hint = did_you_mean(protocol[:SHOWN].upper(), PROTOCOLS)
        yield port.violation("protocol", f"'{protocol[:SHOWN]}' is not a protocol{hint}")


RULES: tuple[Rule, ...] = (ports_are_valid, addresses_are_valid)
