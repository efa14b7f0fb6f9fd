{{- /* A repository of images, in the registry of the values: (list $ REPOSITORY). */}}
{{- define "gpushare.repository" -}}
{{- $root := index . 0 }}
{{- $name := index . 1 }}
{{- with $root.Values.imageRegistry -}}
{{ trimSuffix "/" . }}/{{ regexReplaceAll "^[^/]*[.:][^/]*/" $name "" }}
{{- else -}}
{{ $name }}
{{- end }}
{{- end }}

{{- /* The image of a daemon: (list $ KEY-OF-ITS-VALUES). */}}
{{- define "gpushare.image" -}}
{{- $root := index . 0 }}
{{- $image := (index $root.Values (index . 1)).image -}}
{{ include "gpushare.repository" (list $root $image.repository) }}:{{ $image.tag }}
{{- end }}

{{- /* Refuses components that do not go together. */}}
{{- define "gpushare.validate" -}}
{{- $with := .Values.components }}
{{- if and $with.webhooks $with.webhooksCertManager }}
{{- fail "components.webhooks and components.webhooksCertManager are two sources of one certificate: set one of them" }}
{{- end }}
{{- if and $with.certificateFiles $with.webhooksCertManager }}
{{- fail "components.webhooksCertManager includes components.certificateFiles: set one of them" }}
{{- end }}
{{- if and (eq .Values.attach "second-scheduler") (or $with.certificateFiles $with.webhooksCertManager) }}
{{- fail "a second kube-scheduler calls the extender without TLS: set attach to kube-scheduler, or components.webhooks in place of certificateFiles and webhooksCertManager" }}
{{- end }}
{{- if and $with.guardBindings (not (or $with.webhooks $with.webhooksCertManager)) }}
{{- fail "components.guardBindings needs components.webhooks or components.webhooksCertManager" }}
{{- end }}
{{- if and $with.failClosed (not (or $with.webhooks $with.webhooksCertManager)) }}
{{- fail "components.failClosed needs components.webhooks or components.webhooksCertManager" }}
{{- end }}
{{- if and $with.wholeGpus .Values.devicePlugin.affinity }}
{{- fail "components.wholeGpus sets the affinity of the plugin's pods: choose nodes by devicePlugin.nodeSelector in place of devicePlugin.affinity" }}
{{- end }}
{{- end }}

{{- /* "true" unless another project, such as Koordinator, has installed the CustomResourceDefinition. */}}
{{- define "gpushare.installsDefinition" -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" . }}
{{- if or (not $found) (eq (dig "metadata" "labels" "app.kubernetes.io/part-of" "" $found) "gpushare") -}}
true
{{- end }}
{{- end }}

{{- /* The content of a file of a ConfigMap: (list $ NAME). */}}
{{- define "gpushare.file" -}}
{{- $root := index . 0 }}
{{- $name := index . 1 }}
{{- $ours := $root.Files.Get (printf "files/%s" $name) | replace "gpushare-system" $root.Values.namespace }}
{{- index $root.Values.files $name | default $ours }}
{{- end }}

{{- define "gpushare.kubeSchedulerConfig" -}}
gpushare-kube-scheduler-config-{{ include "gpushare.file" (list . "kube-scheduler-config.yaml") | sha256sum | trunc 10 }}
{{- end }}

{{- /* The version of the second kube-scheduler: the API server's minor version or the one before. */}}
{{- define "gpushare.kubeSchedulerTag" -}}
{{- $image := .Values.kubeScheduler.image }}
{{- $server := regexFind "^v[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version }}
{{- $ofServer := (semver $server).Minor | int }}
{{- $ofImage := (semver $image.tag).Minor | int }}
{{- if or (eq $ofImage $ofServer) (eq $ofImage (sub $ofServer 1 | int)) -}}
{{ $image.tag }}
{{- else if eq $image.repository "registry.k8s.io/kube-scheduler" -}}
{{ $server }}
{{- else -}}
{{- fail (printf "%s:%s does not match the API server %s: put %s into your registry and set kubeScheduler.image.tag" $image.repository $image.tag $server $server) }}
{{- end }}
{{- end }}

{{- define "gpushare.kubeSchedulerImage" -}}
{{ include "gpushare.repository" (list . .Values.kubeScheduler.image.repository) }}:{{ include "gpushare.kubeSchedulerTag" . }}
{{- end }}

{{- define "gpushare.misfitNodes" -}}
{{- if ge ((semver (include "gpushare.kubeSchedulerTag" .)).Minor | int) 38 -}}
resolvable
{{- else -}}
unresolvable
{{- end }}
{{- end }}
