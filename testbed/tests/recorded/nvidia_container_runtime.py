#!/usr/bin/env python3
"""Records what NVIDIA's container runtime makes of containers: mode, default kind, hardening, specs, variables.

    nvidia_container_runtime.py BIN LIBRARY > nvidia_container_runtime.json

BIN holds nvidia-container-runtime, nvidia-container-runtime-hook and nvidia-ctk of one version of the NVIDIA Container
Toolkit. LIBRARY is a libnvidia-ml.so.1: device-plugin/tests/stand_in/nvml.c compiled to a shared library, which needs no
GPU. Runs as root, because it makes device nodes. The test `nvidia_runtime` compares the testbed's model with the result.
"""
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile

GPUS = ["GPU-5a1d9f6c-0b1e-4c6a-9f4e-000000000000", "GPU-6b1d9f6c-0b1e-4c6a-9f4e-000000000001"]
UNKNOWN = "GPU-7c1d9f6c-0b1e-4c6a-9f4e-000000000002"
VARIABLE = "NVIDIA_VISIBLE_DEVICES"
# Values of the variable, and what else is in the environment.
ENVIRONMENTS = [
    {},
    {"CUDA_VERSION": "9.0"},
    {"CUDA_VERSION": "12.4", "NVIDIA_REQUIRE_CUDA": "cuda>=12.4"},
    *({VARIABLE: value} for value in [
        "", "void", "none", "all", GPUS[0], "0", "1", f"{GPUS[0]},{GPUS[1]}", f"void,{GPUS[0]}", f"{GPUS[1]},all", UNKNOWN, "7",
        f"nvidia.com/gpu={GPUS[0]}", "management.nvidia.com/gpu=all", f"nvidia.com/gpu={GPUS[0]},{GPUS[1]}"]),
]
SPECS = {"both": ["toolkit", "management"], "toolkit": ["toolkit"], "management": ["management"], "none": []}
# A hardened runtime ignores the variable of containers without privileges.
TRUST = [("open", False), ("hardened", False), ("hardened", True)]


def cases():
    for mode, (trust, is_privileged), env in itertools.product(["legacy", "jit-cdi"], TRUST, ENVIRONMENTS):
        yield {"mode": mode, "kind": "nvidia.com/gpu", "trust": trust, "privileged": is_privileged, "specs": "both", "env": env}
    kinds = ["nvidia.com/gpu", "management.nvidia.com/gpu"]
    for kind, specs, (trust, is_privileged), env in itertools.product(kinds, SPECS, TRUST, ENVIRONMENTS):
        yield {"mode": "cdi", "kind": kind, "trust": trust, "privileged": is_privileged, "specs": specs, "env": env}
    for kind, env in itertools.product(kinds, ENVIRONMENTS):
        yield {"mode": "auto", "kind": kind, "trust": "open", "privileged": False, "specs": "both", "env": env}
    # Devices that a device plugin names in an annotation of the container.
    annotations = {"cdi.k8s.io/plugin": f"nvidia.com/gpu={GPUS[0]}"}
    for mode, trust, env in itertools.product(["legacy", "jit-cdi", "cdi", "auto"], ["open", "hardened"], ENVIRONMENTS[:5]):
        case = {"mode": mode, "kind": "nvidia.com/gpu", "trust": trust, "privileged": False, "specs": "both", "env": env}
        yield {**case, "annotations": annotations}


class Machine:
    """A driver's root directory with two GPUs, and the specs that nvidia-ctk makes of it."""

    def __init__(self, folder, binaries, library):
        self.folder, self.binaries, self.root = folder, binaries, os.path.join(folder, "driver")
        libraries = os.path.join(self.root, "usr/lib/x86_64-linux-gnu")
        for path in [libraries, os.path.join(self.root, "dev"), self.path("bundle"), self.path("bin"), *map(self.path, SPECS)]:
            os.makedirs(path)
        version = "550.54.15"
        for name in ["libcuda.so", "libnvidia-ml.so"]:
            shutil.copy(library, os.path.join(libraries, f"{name}.{version}"))
        os.symlink(f"libnvidia-ml.so.{version}", os.path.join(libraries, "libnvidia-ml.so.1"))
        self.write("driver/usr/lib/x86_64-linux-gnu/devices", "".join(
            f"{at} {uuid} {at} 17179869184 0 1 0 00000000:{0x3b + at:02X}:00.0 Tesla T4\n" for at, uuid in enumerate(GPUS)))
        for name, major, minor in [("nvidia0", 195, 0), ("nvidia1", 195, 1), ("nvidiactl", 195, 255), ("nvidia-uvm", 510, 0)]:
            os.mknod(os.path.join(self.root, "dev", name), 0o20666, os.makedev(major, minor))
        self.environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        # What nvidia-container-cli is asked for; the hook runs it in its own place.
        self.write("bin/nvidia-container-cli", '#!/bin/sh\necho "cli: $*"\n', 0o755)
        self.write("bin/low-level", f'#!/bin/sh\ncat "{self.path("bundle/config.json")}"\n', 0o755)
        for name, flags in [("toolkit", ["--mode=nvml"]), ("management", ["--mode=management", "--vendor=management.nvidia.com"])]:
            spec = self.path(f"{name}.yaml")
            names = ["--device-name-strategy=index", "--device-name-strategy=uuid"]
            roots = [f"--driver-root={self.root}", f"--dev-root={self.root}"]
            self.run([self.binary("nvidia-ctk"), "cdi", "generate", *flags, *names, *roots, f"--output={spec}"], check=True)
            for specs, held in SPECS.items():
                if name in held:
                    shutil.copy(spec, self.path(specs))

    def path(self, name):
        return os.path.join(self.folder, name)

    def binary(self, name):
        return os.path.join(self.binaries, name)

    def write(self, name, text, mode=0o644):
        with open(self.path(name), "w") as file:
            file.write(text)
        os.chmod(self.path(name), mode)

    def run(self, command, check=False, **more):
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=check, **more)

    def configure(self, case):
        accepts = "true" if case["trust"] == "open" else "false"
        self.write("config.toml", f'''
accept-nvidia-visible-devices-envvar-when-unprivileged = {accepts}
[nvidia-container-cli]
root = "{self.root}"
path = "{self.path("bin/nvidia-container-cli")}"
ldconfig = "@/bin/true"
[nvidia-container-runtime]
log-level = "error"
mode = "{case["mode"]}"
runtimes = ["{self.path("bin/low-level")}"]
[nvidia-container-runtime.modes.cdi]
default-kind = "{case["kind"]}"
annotation-prefixes = ["cdi.k8s.io/"]
spec-dirs = ["{self.path(case["specs"])}"]
''')
        capabilities = ["CAP_CHOWN", *(["CAP_SYS_ADMIN"] if case["privileged"] else [])]
        env = ["PATH=/usr/bin", *(f"{name}={value}" for name, value in case["env"].items())]
        process = {"user": {"uid": 0, "gid": 0}, "args": ["sh"], "env": env, "cwd": "/"}
        process["capabilities"] = {kind: capabilities for kind in ["bounding", "effective", "permitted"]}
        config = {"ociVersion": "1.0.2", "process": process, "root": {"path": "rootfs"}, "mounts": []}
        config["annotations"] = case.get("annotations", {})
        self.write("bundle/config.json", json.dumps({**config, "linux": {"namespaces": [{"type": "mount"}]}}))

    def outcome(self, case):
        self.configure(case)
        self.environment["NVIDIA_CTK_CONFIG_FILE_PATH"] = self.path("config.toml")
        made = self.run([self.binary("nvidia-container-runtime"), "create", "--bundle", self.path("bundle"), "case"])
        if made.returncode:
            return {"error": reason(made.stderr)}
        config = json.loads(made.stdout)
        hooks = [hook["path"] for hook in config.get("hooks", {}).get("prestart", [])]
        if any(path.endswith("nvidia-container-runtime-hook") for path in hooks):
            return self.hooked()
        nodes = [node["path"] for node in config["linux"].get("devices", [])]
        values = [pair.split("=", 1)[1] for pair in config["process"]["env"] if pair.startswith(f"{VARIABLE}=")]
        mounts = [mount["destination"] for mount in config.get("mounts", [])]
        return found(sorted(int(node[len("/dev/nvidia"):]) for node in nodes if node[len("/dev/nvidia"):].isdigit()),
                     any("libcuda" in mount for mount in mounts), values[-1] if values else None)

    def hooked(self):
        """In legacy mode a hook decides when the container starts: the devices that it asks nvidia-container-cli for."""
        state = json.dumps({"pid": os.getpid(), "bundle": self.path("bundle")})
        command = [self.binary("nvidia-container-runtime-hook"), "-config", self.path("config.toml"), "prestart"]
        asked = self.run(command, input=state)
        if asked.returncode:
            return {"error": reason(asked.stderr)}
        line = next((line for line in asked.stdout.splitlines() if line.startswith("cli: ")), None)
        with open(self.path("bundle/config.json")) as file:
            env = json.load(file)["process"]["env"]
        values = [pair.split("=", 1)[1] for pair in env if pair.startswith(f"{VARIABLE}=")]
        if line is None:
            return found([], False, values[-1] if values else None)
        devices = [word[len("--device="):] for word in line.split() if word.startswith("--device=")]
        return {"cli": ",".join(devices), "visible": values[-1] if values else None}


def found(gpus, has_driver, visible):
    return {"gpus": gpus, "driver": has_driver, "visible": visible}


def reason(text):
    """The last part of an error, which has no paths of this machine."""
    text = text.strip().splitlines()[-1] if text.strip() else ""
    if "msg=" in text:
        text = text.split('msg="', 1)[1].rstrip('"')
    parts = text.split(": ")
    at = next((at for at, part in enumerate(parts) if part.startswith("unresolvable CDI devices")), len(parts) - 1)
    return ": ".join(parts[at:])


def main():
    binaries, library = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(folder, os.path.abspath(binaries), library)
        version = machine.run([machine.binary("nvidia-ctk"), "--version"]).stdout.splitlines()[0].split()[-1]
        recorded = [{**case, "outcome": machine.outcome(case)} for case in cases()]
    rows = ",\n".join(json.dumps(row) for row in recorded)
    print(f'{{"program": "nvidia-container-runtime {version}", "gpus": {json.dumps(GPUS)}, "cases": [\n{rows}\n]}}')


main()
