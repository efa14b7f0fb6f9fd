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

# --- files below a root ------------------------------------------------------------------------------------------------

# resolve ROOT PATH: the path below the root to which a path leads for a process of that system: the target of an absolute link
# begins at the root, and ".." never leads out of it. Fails if links form a loop.
resolve() {
    left=$2 done= links=0
    while [ -n "$left" ]; do
        name=${left%%/*}
        case $left in */*) left=${left#*/} ;; *) left= ;; esac
        case $name in
            '' | .) ;;
            ..) done=${done%/*} ;;
            *)
                if [ -L "$1$done/$name" ]; then
                    links=$((links + 1))
                    if [ $links -gt 40 ]; then return 1; fi
                    target=$(readlink "$1$done/$name")
                    case $target in /*) done= ;; esac
                    left=$target/$left
                else
                    done=$done/$name
                fi
                ;;
        esac
    done
    printf '%s\n' "$done"
}

# settings_of ROOT PATTERN...: the lines of the files that the patterns stand for, without comments.
settings_of() {
    of=$1
    shift
    for pattern in "$@"; do
        dir=${pattern%/*}
        # The folder may be a link.
        case $dir in *\**) ;; *) dir=$(resolve "$of" "$dir") || continue ;; esac
        for found in "$of"$dir/${pattern##*/}; do
            file=$(resolve "$of" "${found#"$of"}") || continue
            if [ -f "$of$file" ]; then sed 's/#.*//; /^[[:space:]]*$/d' "$of$file"; fi
        done
    done
}

# --- the state of the node ---------------------------------------------------------------------------------------------

# The plugin reads the same files (device-plugin/src/inject/injection/runtime_files.rs).
runtime_settings() {
    settings_of "$root" /etc/containerd/config.toml '/etc/containerd/conf.d/*.toml' '/etc/containerd/*/*.toml' \
        '/var/lib/rancher/*/agent/etc/containerd/config.toml' '/var/lib/rancher/*/agent/etc/containerd/*/*.toml' \
        /etc/k0s/containerd.toml '/etc/k0s/containerd.d/*.toml' /run/k0s/containerd-cri.toml \
        /var/snap/microk8s/current/args/containerd.toml /etc/cri/containerd.toml '/etc/cri/conf.d/*.toml' \
        /etc/crio/crio.conf '/etc/crio/crio.conf.d/*'
}

toolkit_settings() {
    for file in /usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml /etc/nvidia-container-runtime/config.toml; do
        found=$(settings_of "$root" "$file")
        if [ -n "$found" ]; then printf '%s\n' "$found"; return; fi
    done
}

# Hooks by which CRI-O gives GPUs to every container, without a runtime of NVIDIA's.
hook_settings() {
    settings_of "$root" '/usr/share/containers/oci/hooks.d/*.json' '/etc/containers/oci/hooks.d/*.json'
}

# has LINES KEY VALUE: succeeds if a line sets the key to the value.
has() { printf '%s\n' "$1" | grep -Eq "^[[:space:]]*$2[[:space:]]*=[[:space:]]*[\"']?$3[\"']?[[:space:]]*$"; }

# The file names of CDI specs of a kind.
specs_of() {
    for dir in "$root/etc/cdi" "$root/var/run/cdi" "$root/run/cdi"; do
        if [ -d "$dir" ]; then grep -ls "kind\"\{0,1\}: *\"\{0,1\}$1" "$dir"/* 2>/dev/null || true; fi
    done | sed "s|^$root||" | sort -u
}

# configured_folders ROOT FILE DEPTH: the folders that a file of the loader's configuration names.
configured_folders() {
    if [ "$3" -gt 8 ]; then return; fi
    settings_of "$1" "$2" | while read -r first rest; do
        case $first in
            include)
                # A pattern stands for files below the root alone.
                set -f
                for pattern in $rest; do
                    set +f
                    case $pattern in /*) ;; *) pattern=${2%/*}/$pattern ;; esac
                    dir=$(resolve "$1" "${pattern%/*}") || continue
                    for found in "$1$dir"/${pattern##*/}; do
                        if [ -e "$found" ] || [ -L "$found" ]; then (configured_folders "$1" "${found#"$1"}" $(($3 + 1))); fi
                    done
                done
                ;;
            /*) printf '%s\n' "$first${rest:+ $rest}" ;;
        esac
    done
}

# The paths that may be the management library below a root, in the order of that system's own loader: its cache, the folders of its
# configuration, and those in which distributions and vendors keep a driver. The plugin has the same order and the same folders
# (device-plugin/src/devices/inventory/driver_library.rs).
library_candidates() {
    cache=$(resolve "$1" /etc/ld.so.cache) && if [ -f "$1$cache" ]; then
        tr '\000\n' '\n\001' <"$1$cache" | grep -a '^/.*/libnvidia-ml\.so\.1$' || true
    fi
    for folder in $(configured_folders "$1" /etc/ld.so.conf 0) \
        /usr/lib64 /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib/x86_64-linux-gnu/nvidia/current \
        /usr/lib/aarch64-linux-gnu/nvidia/current /lib64 /lib/x86_64-linux-gnu /lib/aarch64-linux-gnu /usr/lib /lib \
        /usr/local/glibc/usr/lib /usr/lib/nvidia/tesla /run/opengl-driver/lib /usr/local/nvidia/lib64 /usr/local/nvidia/lib \
        /usr/local/lib64 /usr/local/lib /opt/nvidia/lib64; do
        echo "$folder/libnvidia-ml.so.1"
    done
}

# The management library below a root; nothing if there is none for 64-bit programs.
library_in() {
    library_candidates "$1" | while read -r candidate; do
        library=$(resolve "$1" "$candidate") || continue
        if [ -f "$1$library" ] && [ "$(head -c 5 "$1$library" | od -An -tx1 | tr -d ' \n')" != 7f454c4601 ]; then
            printf '%s\n' "$library"
            return
        fi
    done
}

# Sets the driver's directory and the library's path on the node.
find_driver() {
    driver= library=
    for dir in "" /run/nvidia/driver /home/kubernetes/bin/nvidia; do
        library=$(library_in "$root$dir")
        if [ -n "$library" ]; then
            driver=${dir:-/} library=$dir$library
            return
        fi
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
    hooks=$(hook_settings)
    is_default=no
    if has "$runtime" 'default_runtime(_name)?' 'nvidia[^"'"'"']*' || printf '%s' "$hooks" | grep -q nvidia; then is_default=yes; fi
    is_configured=no; if printf '%s' "$runtime" | grep -q 'nvidia-container-runtime'; then is_configured=yes; fi
    is_installed=no; if [ -n "$toolkit" ] || [ $is_configured = yes ]; then is_installed=yes; fi
    is_hardened=no; if has "$toolkit" accept-nvidia-visible-devices-envvar-when-unprivileged false; then is_hardened=yes; fi
    management=$(specs_of management.nvidia.com/gpu)
    specs=$(specs_of nvidia.com/gpu; specs_of k8s.device-plugin.nvidia.com/gpu; printf '%s' "$management")
    is_operator=no; if [ -n "$management" ] || [ -d "$root/run/nvidia/validations" ]; then is_operator=yes; fi
    find_driver
    cdi=$(cdi_state)
    is_enforcing=no; if [ "$(cat "$root/sys/fs/selinux/enforce" 2>/dev/null || echo 0)" = 1 ]; then is_enforcing=yes; fi
    has_static_specs=no; if [ -d "$root/etc/cdi" ]; then has_static_specs=yes; fi
    is_etc_read_only=$(etc_read_only)
}

# The pods whose containers see the GPUs without requesting any, if their image sets NVIDIA_VISIBLE_DEVICES=all.
exposed_pods() {
    if [ $is_hardened = yes ]; then echo none
    elif [ $is_default = yes ]; then echo all
    elif [ $is_configured = yes ]; then echo "with the RuntimeClass nvidia"
    elif [ -z "$runtime" ]; then echo "not known: the container runtime's configuration was not found"
    else echo none
    fi
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
    row "pods that see GPUs without a request" "$(exposed_pods)"
    row "the driver's directory" "${driver:-none}"
    row "the driver's library" "${library:-none}"
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
