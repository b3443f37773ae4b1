"""Rules for manifests beyond the schema of their kind.

A rule is a function that receives a part of a manifest and yields its violations. A table at the end of each module
lists the rules of one part. There are two kinds of rules:

- Rules of KubeRay's operator, which reports a violation only after a manifest has been applied. Their docstrings name
  the function in `ray-operator/controllers/ray/utils/validation.go` of KubeRay 1.7 from which they are derived.
- Rules of this project: where work is placed, which rights a pod has, and no secrets in clear text.
"""
