"""The syntax of names, keys and values in Kubernetes. Specs and manifests are checked by the same functions.

Source: k8s.io/apimachinery/pkg/util/validation of Kubernetes 1.34; for images, github.com/distribution/reference.
"""

import re
from collections.abc import Mapping

SHOWN = 60  # characters of a name or value that a message shows
_MOVING_TAGS = ("latest", "nightly", "main", "master", "stable", "dev", "edge")  # the image behind such a tag changes
KEY_MESSAGE = "is not a valid key; use at most 63 letters, digits, '-', '_' and '.', after an optional domain"
LABEL_MESSAGE = "is not a valid label; use at most 63 letters, digits, '-', '_' and '.'"
NAME_MESSAGE = "is not a valid name; use a to z, 0 to 9, - and dots"

DNS_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # Kubernetes and KubeRay derive the names of pods and services from these
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_FOLDER = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9][-A-Za-z0-9.]*(?::[0-9]{{1,5}})?/)?"  # registry
    rf"{_FOLDER}(?:/{_FOLDER})*"
    r"(?::[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(?:@[a-z0-9]+:[0-9a-f]{32,128})?"
)


def is_dns_name(name: str) -> bool:
    """Whether an object can have this name: IsDNS1123Subdomain."""
    return len(name) <= 253 and bool(_DNS_SUBDOMAIN.fullmatch(name))


def is_qualified_name(key: str) -> bool:
    """Whether a text is a name with an optional domain before it: IsQualifiedName."""
    prefix, separator, name = key.rpartition("/")
    return bool(_NAME_PART.fullmatch(name)) and (is_dns_name(prefix) or not separator)


def is_label_value(value: str) -> bool:
    """Whether a text can be the value of a label: IsValidLabelValue."""
    return not value or bool(_NAME_PART.fullmatch(value))


def is_config_key(key: str) -> bool:
    """Whether a text can be a key of a Secret: IsConfigMapKey."""
    return bool(_CONFIG_KEY.fullmatch(key)) and key not in (".", "..")


def checked_name(name: str) -> str:
    """The name itself.

    Raises:
        ValueError: with the nearest valid name, if an object cannot have this one.
    """
    if is_dns_name(name):
        return name
    near = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")
    hint = f"; did you mean '{near[:SHOWN]}'?" if is_dns_name(near) else ""
    raise ValueError(f"'{name[:SHOWN]}' {NAME_MESSAGE}{hint}")


def check_labels(labels: Mapping[str, str]) -> None:
    """Reject labels that Kubernetes does not accept.

    Raises:
        ValueError: for keys and values that no label can have.
    """
    for key, value in labels.items():
        if not is_qualified_name(key):
            raise ValueError(f"'{key[:SHOWN]}' {KEY_MESSAGE}")
        if not is_label_value(value):
            raise ValueError(f"'{value[:SHOWN]}' {LABEL_MESSAGE}")


def check_annotations(annotations: Mapping[str, str]) -> None:
    """Reject annotations that Kubernetes does not accept.

    Raises:
        ValueError: for keys that no annotation can have. Their values are free.
    """
    for key in annotations:
        if not is_qualified_name(key.lower()):
            raise ValueError(f"'{key[:SHOWN]}' {KEY_MESSAGE}")


def check_image(image: str) -> None:
    """Reject a text that is not a valid image reference.

    Raises:
        ValueError: with the nearest valid reference, if a machine could not pull this image.
    """
    if _IMAGE.fullmatch(image):
        return
    # A tag has no slash; a colon before a slash is that of a port.
    name = image.partition("@")[0]
    end = name.rfind(":") if name.rfind(":") > name.rfind("/") else len(name)
    near = image[:end].lower() + image[end:]
    hint = f"; did you mean '{near[:200]}'?" if _IMAGE.fullmatch(near) else ""
    raise ValueError(
        f"'{image[:200]}' is not a valid image reference; expected REGISTRY/NAME:VERSION, with a lower-case name{hint}"
    )


def is_pinned(image: str) -> bool:
    """Whether an image has a version: a digest, or a tag behind which the image does not change."""
    name = image.rpartition("/")[2]  # a registry's port also follows a colon
    return ":" in name and name.rpartition(":")[2] not in _MOVING_TAGS


def check_pinned(image: str) -> None:
    """Reject an image without a version.

    Raises:
        ValueError: if this is not a valid image reference, or has no version.
    """
    check_image(image)
    if not is_pinned(image):
        folder, slash, name = image.rpartition("/")
        pinned = f"{folder}{slash}{name.partition(':')[0]}:0.1.0"
        raise ValueError(f"'{image}' may change between pods; name a version, for example {pinned}, or a digest")
