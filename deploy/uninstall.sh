#!/bin/sh
# Removes gpushare from the cluster, or from some of its nodes, which other pods may go on using.
#
#   deploy/uninstall.sh                  everything: CDI specs, node status, annotations and labels, then all objects, and Helm's
#                                        release if the chart was installed
#   deploy/uninstall.sh NODE...          the same of these nodes alone; gpushare stays on the others
#   deploy/uninstall.sh --force ...      although pods still hold devices: their containers do not start again
#
# Stops before any change while pods hold devices, or while the cluster's own kube-scheduler calls the extender, and names them.
# Takes about six minutes: kubelet writes a plugin's amounts into node status for five minutes after its end.
# TIMEOUT (default 15m) is the time for the nodes, GPUSHARE_NAMESPACE (default gpushare-system) the namespace of the daemons.
set -eu

usage() { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }

namespace=${GPUSHARE_NAMESPACE:-gpushare-system}
label=app.kubernetes.io/part-of=gpushare
cluster_kinds=clusterrolebindings.rbac.authorization.k8s.io,clusterroles.rbac.authorization.k8s.io,\
flowschemas.flowcontrol.apiserver.k8s.io,prioritylevelconfigurations.flowcontrol.apiserver.k8s.io,\
validatingadmissionpolicies.admissionregistration.k8s.io,\
validatingadmissionpolicybindings.admissionregistration.k8s.io
webhooks=mutatingwebhookconfigurations.admissionregistration.k8s.io,validatingwebhookconfigurations.admissionregistration.k8s.io
devices=devices.scheduling.koordinator.sh

is_forced=no
now=
if [ "${1:-}" = --force ]; then
    is_forced=yes
    now=', {"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--now"}'
    shift
fi
for node; do case $node in -*) usage ;; esac; done
nodes=$*
if [ -n "$nodes" ]; then kubectl get nodes $nodes -o name >/dev/null; fi

# is_among NODE: succeeds if the node is an argument of this script, or there are no arguments.
is_among() { case " $nodes " in "  " | *" $1 "*) return 0 ;; *) return 1 ;; esac }

# --- obstacles ---------------------------------------------------------------------------------------------------------

holders() {
    record='{.metadata.annotations.scheduling\.koordinator\.sh/device-allocated}{.metadata.annotations.ALIYUN_COM_GPU_MEM_IDX}'
    limits='{.spec.containers[*].resources.limits}{.spec.initContainers[*].resources.limits}'
    line='{.metadata.namespace}{"/"}{.metadata.name}{"\t"}{.spec.nodeName}{"\t"}'"$record"'{"\t"}'"$limits"'{"\n"}'
    kubectl get pods --all-namespaces --field-selector=status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!= \
        -o jsonpath="{range .items[*]}$line{end}" |
        awk -F '\t' '$3 != "" || $4 ~ /"(aliyun\.com\/gpu-mem|koordinator\.sh\/[a-z.-]+)":/ { print $2, $1 }'
}

found=$(holders | while read -r node pod; do if is_among "$node"; then echo "  $pod on $node"; fi; done)
if [ -n "$found" ]; then
    echo "These pods hold devices:" >&2
    echo "$found" >&2
    if [ $is_forced = no ]; then echo "Delete them first, or use --force. Nothing has been changed." >&2; exit 1; fi
fi
if [ -z "$nodes" ]; then
    attached=$(kubectl -n kube-system get pods -l component=kube-scheduler \
        -o jsonpath='{range .items[*]}{.spec.nodeName} {.spec.volumes[*].hostPath.path}{"\n"}{end}' |
        sed -n 's|^\([^ ]*\) .*/etc/kubernetes/gpushare.*|\1|p')
    if [ -n "$attached" ]; then
        echo "kube-scheduler still calls the extender on:" $attached >&2
        echo "Undo the change of /etc/kubernetes/manifests/kube-scheduler.yaml there:" >&2
        echo "pods that share GPUs would wait for an extender that is gone." >&2
        if [ $is_forced = no ]; then echo "Nothing has been changed." >&2; exit 1; fi
    fi
fi

# --- the nodes ---------------------------------------------------------------------------------------------------------

marks='{.metadata.labels.gpushare}{.metadata.annotations.gpushare/devices-revision}'
used=$(kubectl get nodes -o jsonpath='{range .items[*]}{.metadata.name}{"\t"}'"$marks"'{"\n"}{end}' |
    awk -F '\t' '$2 != "" { print $1 }' | while read -r node; do if is_among "$node"; then echo "$node"; fi; done)
if [ -z "$nodes" ]; then
    # So that no pod is placed on a node without a plugin.
    if [ -n "$(kubectl -n "$namespace" get deployment gpushare-scheduler --ignore-not-found -o name)" ]; then
        kubectl -n "$namespace" scale deployment gpushare-scheduler --replicas=0
    fi
fi
if [ -n "$used" ]; then
    # The plugin's pod with a command, on the nodes with the other value of the label.
    kubectl -n "$namespace" get daemonset gpushare-device-plugin -o json |
        kubectl patch --local -f - --type=json -o json -p '[
            {"op": "replace", "path": "/metadata", "value": {"name": "gpushare-uninstall", "namespace": "'"$namespace"'",
                "labels": {"app.kubernetes.io/name": "gpushare-uninstall", "app.kubernetes.io/part-of": "gpushare"}}},
            {"op": "add", "path": "/spec/selector", "value": {"matchLabels": {"app.kubernetes.io/name": "gpushare-uninstall"}}},
            {"op": "add", "path": "/spec/template/metadata/labels", "value":
                {"app.kubernetes.io/name": "gpushare-uninstall", "app.kubernetes.io/part-of": "gpushare"}},
            {"op": "add", "path": "/spec/template/spec/nodeSelector", "value": {"kubernetes.io/os": "linux", "gpushare": "uninstall"}},
            {"op": "add", "path": "/spec/template/spec/affinity", "value": {}},
            {"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "uninstall"}'"$now"']' |
        kubectl apply -f -
    echo "Cleaning" $used
    kubectl label node $used gpushare=uninstall --overwrite
    if ! kubectl -n "$namespace" rollout status daemonset/gpushare-uninstall --timeout="${TIMEOUT:-15m}"; then
        kubectl -n "$namespace" logs -l app.kubernetes.io/name=gpushare-uninstall --prefix --tail=1 >&2 || true
        echo "Some nodes are not clean. Run this again; remove the label gpushare from a node that is gone for good." >&2
        exit 1
    fi
    kubectl -n "$namespace" delete daemonset gpushare-uninstall
    kubectl label node $used gpushare- gpushare/whole-gpus- gpushare/moved- >/dev/null
fi

# Koordinator installs the same CustomResourceDefinition without gpushare's label: then the objects are Koordinator's.
part_of=$(kubectl get crd "$devices" --ignore-not-found -o jsonpath='{.metadata.labels.app\.kubernetes\.io/part-of}')
if [ "$part_of" = gpushare ]; then
    if [ -n "$nodes" ]; then kubectl delete "$devices" $nodes --ignore-not-found; fi
else
    echo "The CustomResourceDefinition $devices is not gpushare's: it stays, and so do the Device objects."
fi
if [ -n "$nodes" ]; then exit; fi

# --- the cluster -------------------------------------------------------------------------------------------------------

kubectl delete "$webhooks" -l "$label"
kubectl -n "$namespace" delete deployments,daemonsets -l "$label" --cascade=foreground
kubectl delete "$cluster_kinds" -l "$label"
kubectl -n kube-system delete rolebindings.rbac.authorization.k8s.io -l "$label"
viewers='{range .items[?(@.roleRef.name=="gpushare-viewer")]}{.metadata.name}{"\n"}{end}'
for binding in $(kubectl get clusterrolebindings -o jsonpath="$viewers"); do
    kubectl delete clusterrolebinding "$binding"
done
kubectl delete crd -l "$label"
if [ "$namespace" = gpushare-system ]; then
    kubectl delete namespace "$namespace" --ignore-not-found
else
    # Other objects may be in it, so the namespace goes only if it is part of the installation.
    kubectl -n "$namespace" delete configmaps,networkpolicies.networking.k8s.io,poddisruptionbudgets.policy,resourcequotas,\
rolebindings.rbac.authorization.k8s.io,roles.rbac.authorization.k8s.io,serviceaccounts,services -l "$label"
    kubectl -n "$namespace" delete secrets gpushare-scheduler-certificates --ignore-not-found
    kubectl -n "$namespace" delete leases gpushare-scheduler gpushare-kube-scheduler --ignore-not-found
    kubectl delete namespaces -l "$label"
fi
# The records of Helm, which would take the next installation for an upgrade.
kubectl delete secrets --all-namespaces -l owner=helm,name=gpushare
