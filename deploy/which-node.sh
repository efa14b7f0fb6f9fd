#!/bin/sh
# Inspects an NVIDIA node, and prints the components of deploy/components that it needs.
#
#   deploy/which-node.sh NODE                          starts a pod on that node, which reads its files and is removed again
#   deploy/which-node.sh --root DIR --runtime VERSION  reads the files of a node below DIR; VERSION as in the node's status,
#                                                      such as containerd://2.1.4
#
# Changes nothing on the node. IMAGE (default busybox:1.37) is the image of the pod.
set -eu

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# --- the state of the node ---------------------------------------------------------------------------------------------

# The lines of containerd's, CRI-O's or the toolkit's configuration files, without comments.
runtime_settings() {
    for file in "$root"/etc/containerd/config.toml "$root"/etc/containerd/conf.d/*.toml "$root"/etc/containerd/*/*.toml \
        "$root"/var/lib/rancher/*/agent/etc/containerd/config.toml "$root"/var/lib/rancher/*/agent/etc/containerd/*/*.toml \
        "$root"/etc/crio/crio.conf "$root"/etc/crio/crio.conf.d/*; do
        if [ -f "$file" ]; then sed 's/#.*//' "$file"; fi
    done
}

toolkit_settings() {
    for file in "$root"/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml \
        "$root"/etc/nvidia-container-runtime/config.toml; do
        if [ -f "$file" ]; then sed 's/#.*//' "$file"; return; fi
    done
}

# has LINES KEY VALUE: succeeds if a line sets the key to the value.
has() { printf '%s\n' "$1" | grep -Eq "^[[:space:]]*$2[[:space:]]*=[[:space:]]*\"?$3\"?[[:space:]]*$"; }

# The file names of CDI specs of a kind.
specs_of() {
    for dir in "$root/etc/cdi" "$root/var/run/cdi" "$root/run/cdi"; do
        if [ -d "$dir" ]; then grep -ls "kind\"\{0,1\}: *\"\{0,1\}$1" "$dir"/* 2>/dev/null || true; fi
    done | sed "s|^$root||" | sort -u
}

driver_roots() {
    for dir in "" /run/nvidia/driver /home/kubernetes/bin/nvidia; do
        for lib in usr/lib64 usr/lib/x86_64-linux-gnu usr/lib/aarch64-linux-gnu lib64 usr/lib usr/local/glibc/usr/lib usr/lib/nvidia/tesla; do
            if [ -e "$root$dir/$lib/libnvidia-ml.so.1" ]; then echo "${dir:-/}"; return; fi
        done
    done
}

# "on" if the runtime applies CDI devices: containerd from 2.0 on unless CDI is disabled, 1.7 only if it is enabled.
cdi_state() {
    if has "$runtime" enable_cdi false; then echo off; return; fi
    if has "$runtime" enable_cdi true; then echo on; return; fi
    case $version in
        containerd://1.*) echo off ;;
        *) echo on ;;
    esac
}

# "yes" if the file system of /etc is read-only. The mount in this container may be read-only by itself; the options of the
# file system are the last field.
etc_read_only() {
    awk -v root="$root" '$5 == root "/etc" || $5 == (root == "" ? "/" : root) { if (length($5) >= found) { found = length($5); options = $NF } }
        END { print options ~ /^ro(,|$)/ ? "yes" : "no" }' "${MOUNTINFO:-/proc/self/mountinfo}"
}

look() {
    runtime=$(runtime_settings)
    toolkit=$(toolkit_settings)
    is_default=no; if has "$runtime" default_runtime_name nvidia || has "$runtime" default_runtime nvidia; then is_default=yes; fi
    is_installed=no; if [ -n "$toolkit" ] || printf '%s' "$runtime" | grep -q 'nvidia-container-runtime'; then is_installed=yes; fi
    is_hardened=no; if has "$toolkit" accept-nvidia-visible-devices-envvar-when-unprivileged false; then is_hardened=yes; fi
    management=$(specs_of management.nvidia.com/gpu)
    specs=$(specs_of nvidia.com/gpu; specs_of k8s.device-plugin.nvidia.com/gpu; printf '%s' "$management")
    is_operator=no; if [ -n "$management" ] || [ -d "$root/run/nvidia/validations" ]; then is_operator=yes; fi
    driver=$(driver_roots)
    cdi=$(cdi_state)
    is_enforcing=no; if [ "$(cat "$root/sys/fs/selinux/enforce" 2>/dev/null || echo 0)" = 1 ]; then is_enforcing=yes; fi
    has_static_specs=no; if [ -d "$root/etc/cdi" ]; then has_static_specs=yes; fi
    is_etc_read_only=$(etc_read_only)
}

# --- the components ----------------------------------------------------------------------------------------------------

row() { printf '  %-44s %s\n' "$1" "$2"; }

report() {
    echo "The node:"
    row "NVIDIA's runtime is installed" "$is_installed"
    row "it is the default of the container runtime" "$is_default"
    row "it ignores the variable of unprivileged pods" "$is_hardened"
    row "CDI of $version" "$cdi"
    row "CDI specs of the driver" "$(printf '%s' "$specs" | tr '\n' ' ' | grep . || echo none)"
    row "GPU Operator" "$is_operator"
    row "the driver's directory" "${driver:-none}"
    row "SELinux is enforcing" "$is_enforcing"
    row "/etc/cdi can be created" "$(if [ $has_static_specs = no ] && [ $is_etc_read_only = yes ]; then echo no; else echo yes; fi)"
    echo
    if [ -z "$driver" ]; then
        echo "No NVIDIA driver was found: install it, and run this again."
        return
    fi
    components=
    needs_cdi=yes
    if [ $is_default = yes ] && [ $is_hardened = no ]; then
        if [ $is_operator = no ]; then needs_cdi=no; fi
    elif [ $is_installed = yes ] && [ $is_hardened = no ]; then
        components="nvidia-runtime-class"
    else
        components="driver-root"
    fi
    if [ $is_operator = yes ]; then components="$components gpu-operator"; fi
    if [ $is_enforcing = yes ]; then components="$components selinux"; fi
    if [ $has_static_specs = no ] && [ $is_etc_read_only = yes ]; then components="$components read-only-etc"; fi
    if [ $is_default = yes ] && [ $is_hardened = no ]; then components="$components nri"; fi
    if [ -z "$components" ]; then
        echo "The base is enough: no component is needed."
    else
        echo "components:"
        for component in $components; do echo "  - ../gpushare/deploy/components/$component"; done
    fi
    if [ $needs_cdi = yes ] && [ "$cdi" = off ]; then
        echo
        echo "First set enable_cdi = true for the CRI plugin in containerd's configuration and restart it: pods get no GPU without it."
    fi
    if [ $needs_cdi = yes ] && [ -z "$specs" ]; then
        echo
        echo "First write a CDI spec of the driver: enable nvidia-cdi-refresh.service, or run"
        echo "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml after each change of the driver."
    fi
}

# --- the source of the files -------------------------------------------------------------------------------------------

case ${1:-} in
    --root)
        root=${2%/}
        [ "${3:-}" = --runtime ] || usage
        version=$4
        look
        report
        ;;
    '' | -*) usage ;;
    *)
        version=$(kubectl get node "$1" -o jsonpath='{.status.nodeInfo.containerRuntimeVersion}')
        # It reads files only; spc_t lets it do so where SELinux is enforcing.
        kubectl run "which-node-$$" --namespace "${NAMESPACE:-default}" --rm -i --quiet --restart=Never --image="${IMAGE:-busybox:1.37}" \
            --overrides='{"spec": {"nodeName": "'"$1"'", "tolerations": [{"operator": "Exists"}],
              "containers": [{"name": "which-node", "image": "'"${IMAGE:-busybox:1.37}"'", "stdin": true, "stdinOnce": true,
                "command": ["sh", "-c", "cat > /tmp/which-node.sh && sh /tmp/which-node.sh --root /host --runtime '"$version"'"],
                "securityContext": {"seLinuxOptions": {"type": "spc_t"}},
                "volumeMounts": [{"name": "host", "mountPath": "/host", "readOnly": true, "mountPropagation": "HostToContainer"}]}],
              "volumes": [{"name": "host", "hostPath": {"path": "/"}}]}}' <"$0"
        ;;
esac
