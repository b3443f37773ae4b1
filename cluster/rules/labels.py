"""The syntax of labels, for Kubernetes objects and for Ray nodes."""

import re
from collections.abc import Iterator

from ..types import Violation
from .fields import Fields

# A key may have a prefix, the name of a domain: kueue.x-k8s.io/queue-name.
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


def check_labels(labels: Fields) -> Iterator[Violation]:
    """Keys and values must be strings in the syntax of Kubernetes, which KubeRay also requires of Ray node labels.

    Source: validateRayGroupLabels.
    """
    for key, value in labels.values.items():
        if not isinstance(key, str) or not isinstance(value, str):
            yield labels.violation(str(key), "is not a string; put it in quotes")
        elif not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            message = f"'{value}' is not a valid label; use at most 63 letters, digits, '-', '_' and '.'"
            yield labels.violation(key, message)
