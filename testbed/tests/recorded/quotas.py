#!/usr/bin/env python3
"""Records what kube-apiserver and kube-controller-manager make of pods under the ResourceQuota and the LimitRange of docs/quotas.md.

    quotas.py KUBECONFIG > quotas.json

Needs kubectl, and a cluster in which it may create namespaces. The cluster needs no node: nothing has to run. The test `quotas`
compares the recording with gpushare's own reading of the pods.
"""
import json
import pathlib
import re
import subprocess
import sys
import time

DOCUMENT = pathlib.Path(__file__).resolve().parents[3] / "docs/quotas.md"
SHARED, MEMORY, RATIO, CORE, GPU = (f"koordinator.sh/{name}" for name in ("gpu.shared", "gpu-memory", "gpu-memory-ratio", "gpu-core", "gpu"))
UNITS, WHOLE = "aliyun.com/gpu-mem", "nvidia.com/gpu"
NAMES = [SHARED, MEMORY, RATIO, CORE, GPU, UNITS, WHOLE]
SIDECAR = {"restartPolicy": "Always"}

# Each case has the limits of init containers and of containers.
PODS = {
    "no GPU": ([], [{}]),
    "bytes": ([], [{SHARED: "1", MEMORY: "8Gi"}]),
    "bytes in decimal units": ([], [{SHARED: "1", MEMORY: "8G"}]),
    "bytes and compute": ([], [{SHARED: "1", MEMORY: "8Gi", CORE: "25"}]),
    "percent": ([], [{SHARED: "1", RATIO: "50"}]),
    "percent of two GPUs": ([], [{SHARED: "2", RATIO: "100", CORE: "50"}]),
    "percent of memory and compute": ([], [{SHARED: "1", GPU: "50"}]),
    "units": ([], [{UNITS: "8"}]),
    "whole GPUs": ([], [{WHOLE: "2"}]),
    "two containers": ([], [{SHARED: "1", MEMORY: "8Gi"}, {SHARED: "1", MEMORY: "2Gi"}]),
    "one of two containers": ([], [{SHARED: "1", MEMORY: "8Gi"}, {}]),
    "units in two containers": ([], [{UNITS: "8"}, {UNITS: "3"}]),
    "smaller init container": ([{SHARED: "1", MEMORY: "4Gi"}], [{SHARED: "1", MEMORY: "8Gi"}]),
    "larger init container": ([{SHARED: "1", MEMORY: "12Gi"}], [{SHARED: "1", MEMORY: "8Gi"}]),
    "two init containers": ([{SHARED: "1", MEMORY: "12Gi"}, {SHARED: "1", MEMORY: "10Gi"}], [{SHARED: "1", MEMORY: "8Gi"}]),
    "sidecar": ([{**SIDECAR, SHARED: "1", MEMORY: "1Gi"}], [{SHARED: "1", MEMORY: "8Gi"}]),
    "sidecar before an init container": (
        [{**SIDECAR, SHARED: "1", MEMORY: "3Gi"}, {SHARED: "1", MEMORY: "8Gi"}],
        [{SHARED: "1", MEMORY: "4Gi"}],
    ),
    "sidecar after an init container": (
        [{SHARED: "1", MEMORY: "8Gi"}, {**SIDECAR, SHARED: "1", MEMORY: "3Gi"}],
        [{SHARED: "1", MEMORY: "4Gi"}],
    ),
}

# What happens in the namespace of the document's quota: a pod's name and limits, or a pod that ends or is deleted.
STEPS = [
    ("create", "first", {SHARED: "1", MEMORY: "32Gi"}),
    ("create", "second", {SHARED: "4", MEMORY: "31Gi", CORE: "400"}),
    ("create", "third", {SHARED: "1", MEMORY: "2Gi"}),
    ("create", "no-gpu", {}),
    ("create", "in-percent", {SHARED: "1", RATIO: "10"}),
    ("create", "in-percent-of-both", {SHARED: "1", GPU: "10"}),
    ("create", "in-units", {UNITS: "1"}),
    ("create", "more-compute", {SHARED: "1", MEMORY: "1Gi", CORE: "1"}),
    ("create", "whole", {WHOLE: "2"}),
    ("create", "more-whole", {WHOLE: "1"}),
    ("end", "first", None),
    ("create", "third-again", {SHARED: "1", MEMORY: "2Gi"}),
    ("delete", "second", None),
    ("create", "fourth", {SHARED: "1", MEMORY: "62Gi"}),
]


class Cluster:
    def __init__(self, kubeconfig):
        self.kubeconfig = kubeconfig

    def run(self, *args, text=None):
        command = ["kubectl", "--kubeconfig", self.kubeconfig, *args]
        return subprocess.run(command, input=text, capture_output=True, text=True)

    def __call__(self, *args, text=None):
        done = self.run(*args, text=text)
        if done.returncode != 0:
            sys.exit(f"{' '.join(args)}: {done.stderr}")
        return done.stdout

    def get(self, *args):
        return json.loads(self("get", *args, "-o", "json"))

    def namespace(self, name, *manifests):
        self("create", "namespace", name)
        self.until(lambda: self.run("-n", name, "get", "serviceaccount", "default").returncode == 0)
        for manifest in manifests:
            self("-n", name, "create", "-f", "-", text=manifest if isinstance(manifest, str) else json.dumps(manifest))

    def until(self, is_so):
        deadline = time.monotonic() + 60
        while not is_so():
            if time.monotonic() > deadline:
                sys.exit("the cluster does not do what is waited for")
            time.sleep(0.1)


def blocks():
    """The manifests of the document, by their kind."""
    found = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.S)
    return {re.search(r"^kind: (\w+)$", block, re.M).group(1): block for block in found}


def pod(name, inits, containers):
    def container(kind, idx, limits):
        made = {"name": f"{kind}{idx}", "image": "none", "resources": {"limits": {k: v for k, v in limits.items() if k in NAMES}}}
        made.update({key: limits[key] for key in SIDECAR if key in limits})
        return made

    spec = {"containers": [container("c", *entry) for entry in enumerate(containers)]}
    if inits:
        spec["initContainers"] = [container("i", *entry) for entry in enumerate(inits)]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def quota(amounts):
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}, "spec": {"hard": amounts}}


def ready(cluster, namespace):
    """The admission of the API server looks at the status, which kube-controller-manager writes first."""
    cluster.until(lambda: "hard" in cluster.get("-n", namespace, "resourcequota", "gpus").get("status", {}))


def used(cluster, namespace):
    return cluster.get("-n", namespace, "resourcequota", "gpus")["status"]["used"]


def create(cluster, namespace, manifest):
    """What became of the pod: its specification as it was stored, or the words of the refusal."""
    done = cluster.run("-n", namespace, "create", "-o", "json", "-f", "-", text=json.dumps(manifest))
    if done.returncode == 0:
        made = json.loads(done.stdout)["spec"]
        kept = {key: [{"name": c["name"], "resources": c["resources"]} for c in made[key]] for key in ("initContainers", "containers") if key in made}
        return {"stored": kept}
    return {"refused": done.stderr.split("forbidden: ", 1)[-1].strip()}


def measured(cluster):
    """What a quota of every name counts for each pod."""
    hard = {f"requests.{name}": "1Pi" for name in NAMES}
    for idx in range(len(PODS)):
        cluster.namespace(f"count-{idx}", quota(hard))
    found = []
    for idx, (case, (inits, containers)) in enumerate(PODS.items()):
        ready(cluster, f"count-{idx}")
        manifest = pod("p", inits, containers)
        outcome = create(cluster, f"count-{idx}", manifest)
        assert "stored" in outcome, (case, outcome)
        counts = {name.removeprefix("requests."): amount for name, amount in used(cluster, f"count-{idx}").items() if amount != "0"}
        found.append({"case": case, "pod": manifest, "used": counts})
    return found


def limited(cluster, block):
    """What the document's LimitRange makes of each pod."""
    cluster.namespace("limited", block)
    found = []
    cases = {**PODS, "too much memory": ([], [{SHARED: "1", MEMORY: "17Gi"}]), "too much in a sidecar": ([{**SIDECAR, SHARED: "1", MEMORY: "17Gi"}], [{}])}
    for idx, (case, (inits, containers)) in enumerate(cases.items()):
        manifest = pod(f"p{idx}", inits, containers)
        found.append({"case": case, "pod": manifest, **create(cluster, "limited", manifest)})
    return found


def stepped(cluster, block):
    cluster.namespace("stepped", block)
    ready(cluster, "stepped")
    found = []
    for action, name, limits in STEPS:
        step = {"action": action, "name": name}
        if action == "create":
            step["pod"] = pod(name, [], [limits])
            outcome = create(cluster, "stepped", step["pod"])
            step.update({"refused": outcome["refused"]} if "refused" in outcome else {})
        else:
            before = used(cluster, "stepped")
            if action == "end":
                patch = ["-p", '{"status":{"phase":"Succeeded"}}']
                cluster("-n", "stepped", "patch", "pod", name, "--subresource=status", "--type=merge", *patch)
            else:
                cluster("-n", "stepped", "delete", "pod", name, "--force", "--grace-period=0")
            cluster.until(lambda: used(cluster, "stepped") != before)
        found.append({**step, "used": used(cluster, "stepped")})
    return found


def main():
    cluster = Cluster(sys.argv[1])
    manifests = blocks()
    version = json.loads(cluster("version", "-o", "json"))["serverVersion"]["gitVersion"]
    recorded = {
        "program": f"kube-apiserver and kube-controller-manager {version}",
        "quota": manifests["ResourceQuota"],
        "range": manifests["LimitRange"],
        "counted": measured(cluster),
        "limited": limited(cluster, manifests["LimitRange"]),
        "steps": stepped(cluster, manifests["ResourceQuota"]),
    }
    lists = {key: value for key, value in recorded.items() if isinstance(value, list)}
    texts = {key: value for key, value in recorded.items() if not isinstance(value, list)}
    print(json.dumps(texts)[:-1] + ",")
    for idx, (key, entries) in enumerate(lists.items()):
        lines = ",\n".join(json.dumps(entry) for entry in entries)
        print(f'"{key}": [\n{lines}\n]' + ("," if idx + 1 < len(lists) else "}"))


if __name__ == "__main__":
    main()
