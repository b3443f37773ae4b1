"""KubeRay manifests of a study: described (`spec`), rendered (`render`), checked (`validate`), submitted (`rayjob`).

Of the library, this package imports configuration, node pools, secrets and errors only: no Ray, no torch.
Imports inside the package are relative, because the wheel installs this folder as `pos2distill.cluster`.
"""
