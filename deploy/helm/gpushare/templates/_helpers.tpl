{{- /* An image of a repository and a tag. */}}
{{- define "gpushare.image" -}}
{{ .repository }}:{{ .tag }}
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
{{- index $root.Values.files $name | default ($root.Files.Get (printf "files/%s" $name)) }}
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
{{ .Values.kubeScheduler.image.repository }}:{{ include "gpushare.kubeSchedulerTag" . }}
{{- end }}

{{- define "gpushare.misfitNodes" -}}
{{- if ge ((semver (include "gpushare.kubeSchedulerTag" .)).Minor | int) 37 -}}
resolvable
{{- else -}}
unresolvable
{{- end }}
{{- end }}
