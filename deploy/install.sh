#!/bin/sh
# Installs gpushare from a folder, upgrades it, or changes its attachment: applies the folder, and deletes the objects of an
# earlier installation that the folder does not have.
#
#   deploy/install.sh FOLDER             FOLDER is deploy/base, deploy/attach/second-scheduler, or an overlay of your own
#   deploy/install.sh --dry-run FOLDER   prints what it would do
#
# A second kube-scheduler gets the version of the API server if the version in the folder does not match it. If the attachment
# changes, the old scheduler ends before the new one starts: pods that share GPUs wait meanwhile, and none is placed by both.
# CustomResourceDefinitions are never deleted, as all objects of their kinds would go with them.
set -eu

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

namespace=gpushare-system
label=app.kubernetes.io/part-of=gpushare
# The kinds of objects that a folder may hold, besides the namespace and CustomResourceDefinitions.
kinds=configmaps,daemonsets.apps,deployments.apps,networkpolicies.networking.k8s.io,poddisruptionbudgets.policy,resourcequotas,\
rolebindings.rbac.authorization.k8s.io,roles.rbac.authorization.k8s.io,serviceaccounts,services,\
clusterrolebindings.rbac.authorization.k8s.io,clusterroles.rbac.authorization.k8s.io,flowschemas.flowcontrol.apiserver.k8s.io,\
prioritylevelconfigurations.flowcontrol.apiserver.k8s.io,\
mutatingwebhookconfigurations.admissionregistration.k8s.io,validatingadmissionpolicies.admissionregistration.k8s.io,\
validatingadmissionpolicybindings.admissionregistration.k8s.io,validatingwebhookconfigurations.admissionregistration.k8s.io

is_dry=no
if [ "${1:-}" = --dry-run ]; then is_dry=yes; shift; fi
case ${1:-} in '' | -*) usage ;; esac
[ $# = 1 ] || usage

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
kubectl kustomize "$1" >"$work/rendered.yaml"

# --- the version of a second kube-scheduler ----------------------------------------------------------------------------

# minor VERSION: the second number of a version such as v1.36.2.
minor() { echo "$1" | sed -n 's/^v1\.\([0-9]\{1,3\}\)\..*/\1/p'; }

server=$(kubectl get --raw /version | sed -n 's/.*"gitVersion": *"\(v[0-9]*\.[0-9]*\.[0-9]*\).*/\1/p')
image=$(sed -n 's/^ *\(- \)\{0,1\}image: *"\{0,1\}\([^" ]*\/kube-scheduler:[^" ]*\).*/\2/p' "$work/rendered.yaml")
newer=$server
if [ -n "$image" ]; then
    version=${image##*:}
    of_server=$(minor "$server")
    of_scheduler=$(minor "$version")
    if [ -z "$of_server" ] || [ -z "$of_scheduler" ]; then
        echo "The versions are not compared: $image, API server $server." >&2
    elif [ "$of_scheduler" = "$of_server" ] || [ "$of_scheduler" = $((of_server - 1)) ]; then
        newer=$version
    elif [ "${image%:*}" = registry.k8s.io/kube-scheduler ]; then
        echo "kube-scheduler $version does not match the API server $server: using $server."
    else
        echo "$image does not match the API server $server: put $server into your registry and set newTag in $1." >&2
        exit 1
    fi
fi
if [ "$(minor "$newer")" -ge 38 ] 2>/dev/null; then misfit=resolvable; else misfit=unresolvable; fi
if [ "$misfit" = resolvable ] && [ -n "$image" ] && grep -q -e --make-room=evict "$work/rendered.yaml"; then
    echo "kube-scheduler $newer evicts pods by itself: remove the component make-room from $1." >&2
    exit 1
fi
sed -e "s|\(image: *registry.k8s.io/kube-scheduler\):.*|\1:$newer|" -e "s|--misfit-nodes=unresolvable|--misfit-nodes=$misfit|" \
    "$work/rendered.yaml" >"$work/objects.yaml"

# --- existing and wanted objects ---------------------------------------------------------------------------------------

name='{.kind}/{.metadata.namespace}/{.metadata.name}{"\n"}'
containers='{.spec.template.spec.containers[*].name}'
# "kubectl create" fills the template once per object of a file, "kubectl get" once for the whole list.
kubectl create --dry-run=client -f "$work/objects.yaml" -o jsonpath="$name" >"$work/wanted.all"
kubectl get "$kinds" --all-namespaces -l "$label" -o jsonpath="{range .items[*]}$name{end}" >"$work/found.all"
sort "$work/wanted.all" >"$work/wanted"
sort "$work/found.all" >"$work/found"
[ -s "$work/wanted" ] || { echo "$1 holds no objects." >&2; exit 1; }

attached=$(kubectl -n "$namespace" get deployment gpushare-scheduler --ignore-not-found -o jsonpath="$containers")
attaching=$(kubectl create --dry-run=client -f "$work/objects.yaml" -o jsonpath="{.kind} $containers{\"\\n\"}" | sed -n 's/^Deployment //p')
changes=no
if [ -n "$attached" ] && [ "$attached" != "$attaching" ]; then changes=yes; fi

if [ $is_dry = yes ]; then
    if [ $changes = yes ]; then echo "would end the scheduler first, as its attachment changes (containers $attached, then $attaching)"; fi
    sed 's/^/would apply /' "$work/wanted"
    comm -23 "$work/found" "$work/wanted" | sed 's/^/would delete /'
    exit
fi

# --- the changes -------------------------------------------------------------------------------------------------------

if [ $changes = yes ]; then
    echo "The attachment changes: the scheduler ends first."
    kubectl -n "$namespace" scale deployment gpushare-scheduler --replicas=0
    kubectl -n "$namespace" wait --for=delete pod -l app.kubernetes.io/name=gpushare-scheduler --timeout=120s
    kubectl -n "$namespace" delete lease gpushare-scheduler gpushare-kube-scheduler --ignore-not-found
fi
kubectl apply -f "$work/objects.yaml"
comm -23 "$work/found" "$work/wanted" | while IFS=/ read -r kind of name; do
    kubectl delete "$kind" "$name" ${of:+--namespace="$of"} --ignore-not-found
done
