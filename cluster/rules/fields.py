"""Reading manifests that may be written by hand: any field may be missing or have the wrong type."""

from typing import Any

from ..names import GPU
from ..types import Violation


class Fields:
    """The fields of one mapping in a manifest, and the path to it.

    A field of the wrong type reads as missing. The schema reports wrong types, so the rules need no checks for them.
    """

    def __init__(self, path: str, value: Any) -> None:
        self.path = path
        self.values: dict[Any, Any] = value if isinstance(value, dict) else {}

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __bool__(self) -> bool:
        return bool(self.values)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, of any type."""
        return self.values.get(name, default)

    def integer(self, name: str) -> int | None:
        """The value of a field that must be an integer."""
        value = self.values.get(name)
        # bool is a subclass of int.
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        return value if is_integer else None

    def items_of(self, name: str) -> list[Any]:
        """The items of a list."""
        value = self.values.get(name)
        return value if isinstance(value, list) else []

    def mapping(self, *names: str) -> "Fields":
        """The mapping in a field, or in a field of a field, and so on."""
        fields = self
        for name in names:
            fields = Fields(fields.join(name), fields.values.get(name))
        return fields

    def mappings(self, name: str) -> list["Fields"]:
        """The mappings in a list."""
        return [Fields(f"{self.join(name)}[{index}]", item) for index, item in enumerate(self.items_of(name))]

    def join(self, name: str) -> str:
        """The path to a field."""
        return f"{self.path}.{name}" if self.path else name

    def violation(self, name: str, message: str) -> Violation:
        """A violation of the field `name`, which may be a dotted path."""
        return Violation(self.join(name), message)


def ray_container(group: Fields) -> Fields:
    """The Ray container of the head or of a node group. KubeRay takes the first container of the pod."""
    containers = group.mapping("template", "spec").mappings("containers")
    if not containers:
        # An empty container, so that rules can read it; another rule reports that it is missing.
        return Fields(group.join("template.spec.containers[0]"), None)
    return containers[0]


def environment(group: Fields) -> list[Fields]:
    """Environment variables of the Ray container."""
    return ray_container(group).mappings("env")


def gpu_limit(container: Fields) -> int:
    """GPUs of a container. A value that is not a number counts as 0."""
    amount = str(container.mapping("resources", "limits").get(GPU, "0"))
    # The schema reports other values.
    return int(amount) if amount.isdecimal() else 0
