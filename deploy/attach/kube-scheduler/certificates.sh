#!/bin/sh
# Creates the certificates with which kube-scheduler and the extender authenticate each other, for the component certificate-files
# (without it the scheduler creates them):
#
#   ca.crt, ca.key          an authority for this purpose only; keep ca.key off the cluster
#   server.crt, server.key  the extender's, for the name of its Service
#   client.crt, client.key  kube-scheduler's; every holder of the key may bind pods
#
#   ./certificates.sh [FOLDER]   FOLDER defaults to ./certificates; they are valid for DAYS days (default 365)
#
# An existing authority is used again, so a second run renews the other two.
# Then, for the extender:
#
#   kubectl -n gpushare-system create secret generic gpushare-scheduler-tls \
#     --from-file=tls.crt=server.crt --from-file=tls.key=server.key --from-file=ca.crt=ca.crt
#
# and for kube-scheduler: ca.crt, client.crt and client.key to /etc/kubernetes/gpushare/ of each control-plane node.
set -eu
umask 077

folder=${1:-certificates}
days=${DAYS:-365}
service=gpushare-scheduler.gpushare-system.svc

mkdir -p "$folder"
cd "$folder"

if [ ! -f ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 -days 3650 \
    -subj "/CN=gpushare extender authority" -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" -keyout ca.key -out ca.crt
fi

# issue FILE COMMON-NAME EXTENSIONS
issue() {
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -sha256 -subj "/CN=$2" \
    -keyout "$1.key" -out "$1.csr"
  printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n%b' "$3" >"$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -sha256 -days "$days" \
    -extfile "$1.ext" -out "$1.crt"
  rm "$1.csr" "$1.ext"
}

issue server "$service" "extendedKeyUsage=serverAuth\nsubjectAltName=DNS:$service,DNS:$service.cluster.local\n"
issue client kube-scheduler "extendedKeyUsage=clientAuth\n"
