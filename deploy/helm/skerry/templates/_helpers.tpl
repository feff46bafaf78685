{{/* The release's name, or its name and the chart's. */}}
{{- define "skerry.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change; of a list of the root and the component. */}}
{{- define "skerry.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "skerry.labels" -}}
{{- $root := index . 0 -}}
{{ include "skerry.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* An image's name; of a list of the root and the image's values. */}}
{{- define "skerry.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default (index . 0).Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The Secret of a certificate; of a list of the root, the certificate's name and an existing Secret. */}}
{{- define "skerry.secret" -}}
{{- $root := index . 0 -}}
{{- if index . 2 -}}
{{- index . 2 -}}
{{- else if $root.Values.tls.certManager.enabled -}}
{{- printf "%s-%s-tls" (include "skerry.fullname" $root) (index . 1) -}}
{{- else -}}
{{- fail (printf "%s has no certificate: enable tls.certManager, name its existingSecret, or set tls.insecure" (index . 1)) -}}
{{- end -}}
{{- end -}}

{{/* Where learners and the console find the syncers of this release. */}}
{{- define "skerry.target" -}}
{{- if not .Values.syncer.enabled -}}
{{- fail "without syncers in this release, name those of another: learner.target" -}}
{{- end -}}
{{- printf "%s-syncer.%s.svc:50051" (include "skerry.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* The variables by which a client in a container connects; of a list of the root and a target, or "". */}}
{{- define "skerry.clientEnv" -}}
{{- $root := index . 0 -}}
- name: SKERRY_TARGET
  value: {{ if index . 1 }}{{ index . 1 | quote }}{{ else }}{{ include "skerry.target" $root | quote }}{{ end }}
{{- if $root.Values.tls.insecure }}
- name: SKERRY_INSECURE
  value: "true"
{{- else }}
{{ include "skerry.tlsEnv" . }}
{{- end }}
{{- end -}}

{{- define "skerry.tlsEnv" -}}
- name: SKERRY_TLS_CA
  value: /etc/skerry/ca.crt
- name: SKERRY_TLS_CERT
  value: /etc/skerry/tls.crt
- name: SKERRY_TLS_KEY
  value: /etc/skerry/tls.key
{{- end -}}

{{/* A volume with a certificate, which user 10001 can read; of a list like that of skerry.secret. */}}
{{- define "skerry.tlsVolume" -}}
{{- if not (index . 0).Values.tls.insecure -}}
- name: tls
  secret:
    secretName: {{ include "skerry.secret" . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "skerry.tlsMount" -}}
{{- if not .Values.tls.insecure -}}
- name: tls
  mountPath: /etc/skerry
  readOnly: true
{{- end }}
{{- end -}}

{{/* Restricted, as the images and compose.yaml have it; of the pod's sysctls. */}}
{{- define "skerry.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- with . }}
sysctls: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "skerry.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
