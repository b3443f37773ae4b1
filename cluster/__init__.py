"""From a `ClusterSpec` to KubeRay manifests: described (spec), made (render), checked (validate).

Sees recipes and errors of the library, nothing else of it: no Ray, no torch.
"""
