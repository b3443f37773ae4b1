"""The number of parameters of a study's model."""

import json
import math
from pathlib import Path
from typing import Any

from pos2distill.errors import UserError

from .known_models import known_model
from .spec import ClusterSpec

# Parameters of adapters, in percent of the model: of rank 64 in every linear layer, they are 2 % of an 8 B model.
ADAPTER_PERCENT = 5
_MAX_HEADER_BYTES = 100 << 20  # largest header of a safetensors file


def parameter_count(spec: ClusterSpec, path: str) -> int:
    if spec.model_billions is not None:
        return round(spec.model_billions * 1e9)
    counted = _count_parameters(Path(path))
    if counted:
        return counted
    model = known_model(path)
    if model is None:
        raise UserError(
            f"model.path: {path}: the size of this model is not known here; set spec.model_billions, the billions of "
            f"its parameters, from which the disks of the pods are computed"
        )
    return model.parameters


def _count_parameters(folder: Path) -> int:
    """Parameters in the safetensors of a local folder, from the headers; 0 without any."""
    count = 0
    for file in folder.glob("*.safetensors"):
        if file.name.startswith("consolidated"):
            continue  # Mistral's own copy of the same weights
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            try:
                header: dict[str, Any] = json.loads(opened.read(min(length, _MAX_HEADER_BYTES)))
            except ValueError:
                return 0  # no safetensors; the study itself reports what is wrong with the file
        for name, tensor in header.items():
            if name != "__metadata__":
                count += math.prod(tensor["shape"])
    return count
