"""A kubectl that prints prepared replies, and the objects that these replies show."""

import json
import sys
from typing import Any

STORAGE = "gs://my-bucket/runs/nq_mistral_7b"
ENTRYPOINT = (
    "env --chdir=/opt/pos2distill POS2DISTILL_JOB_DASHBOARD=http://127.0.0.1:8265 "
    "python run.py study nq_mistral_7b data.path=gs://bucket/nq.jsonl.gz runtime.trainers.workers=8 "
    f"runtime.storage={STORAGE}"
)

# Replies to each `VERB KIND` with the next entry of its list, and repeats the last one. kubectl runs concurrently for
# the log and for the status, so a lock guards the script.
FAKE = f"""#!{sys.executable} -S
import fcntl, json, pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
text = sys.stdin.read() if "--filename" in words else ""
turn = open(here / "turn", "w")
fcntl.flock(turn, fcntl.LOCK_EX)
with open(here / "calls.jsonl", "a") as calls:
    calls.write(json.dumps([words, text]) + "\\n")
script = json.loads((here / "script.json").read_text())
name = " ".join(words[:2]) if words[0] == "get" else words[0]
# As kubectl, which prints an empty list.
answers = script.get(name, [{{"out": '{{"items": []}}'}} if name == "get pods" else {{}}])
answer = answers.pop(0) if len(answers) > 1 else answers[0]
(here / "script.json").write_text(json.dumps(script))
turn.close()
print(answer.get("out", ""), end="")
print(answer.get("err", ""), end="", file=sys.stderr)
sys.exit(answer.get("rc", 0))
"""

Reply = dict[str, Any]
LABELS = {"app.kubernetes.io/part-of": "pos2distill", "app.kubernetes.io/instance": "nq-mistral"}


def job(stage: str = "", entrypoint: str = ENTRYPOINT, **status: Any) -> Reply:
    state = {"jobDeploymentStatus": stage, **status}
    metadata = {"name": "nq-mistral", "labels": LABELS, "annotations": {"pos2distill/storage": STORAGE}}
    found = {"kind": "RayJob", "metadata": metadata, "spec": {"entrypoint": entrypoint}, "status": state}
    return {"out": json.dumps(found)}


NONE: Reply = {}
RUNNING = job("Running", jobStatus="RUNNING", rayClusterName="nq-mistral-x")
DONE = job("Complete", jobStatus="SUCCEEDED")
NO_PODS = json.dumps({"items": []})
IDENTITY = {
    "name": "nq-mistral",
    "namespace": "pos2distill",
    "kind": "RayJob",
    "storage": STORAGE,
}
