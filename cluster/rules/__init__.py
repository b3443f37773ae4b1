"""Rules for manifests. A rule is a function that receives a whole manifest and yields its violations.

- `shapes`: the types of fields, as JSON schemas, for kinds whose CRD is not at hand.
- `kubernetes`, `network`, `kuberay`: what the API server and KubeRay's operator reject, which they report only after a
  manifest has been applied, some of it only in the events of a pod. Only rules on fields that `cluster render` writes
  are here.
- `pipeline`, `interruptions`, `pods`, `pod_security`, `objects`: what a study needs, in manifests that carry the label
  of this project.

`manifest` lists all rules with their levels.
"""
