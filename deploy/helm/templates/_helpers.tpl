{{- define "tokenyard.name" -}}
{{- if contains "tokenyard" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-tokenyard{{ end }}
{{- end }}

{{/* Not empty where each server is the leader of a group of its workers. */}}
{{- define "tokenyard.groups" -}}
{{- if and .Values.workers.leaderWorkerSet (gt (int .Values.workers.replicas) 0) }}groups{{ end }}
{{- end }}

{{/* Not empty where each worker is a group of pods. */}}
{{- define "tokenyard.nodes" -}}
{{- if and (gt (int .Values.workers.nodes) 1) (gt (int .Values.workers.replicas) 0) }}nodes{{ end }}
{{- end }}

{{/* Labels that never change: they select pods. `part` is server or worker. */}}
{{- define "tokenyard.selector" -}}
app.kubernetes.io/name: tokenyard
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "tokenyard.labels" -}}
{{ include "tokenyard.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "tokenyard.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* What pods of servers and workers share. The user is that of the image. */}}
{{- define "tokenyard.pod" -}}
automountServiceAccountToken: false
# Kubernetes would add variables such as TOKENYARD_PORT=tcp://10.0.0.1:80, which are names of settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tokenyard.selector" . | nindent 8 }}
{{- with .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tokenyard.resources" -}}
{{- $resources := deepCopy .resources }}
{{- if .gpus }}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" .gpus) ($resources.limits | default dict)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Settings of the operator, for servers and workers alike. Helm's numbers are floats: 4000000 would be 4e+06. */}}
{{- define "tokenyard.environment" -}}
{{- range $name, $value := .Values.settings }}
- name: TOKENYARD_{{ upper $name }}
  value: {{ ternary (int64 $value | toString) (toString $value) (kindIs "float64" $value) | quote }}
{{- end }}
{{- with .Values.secrets.hub }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- end }}

{{- define "tokenyard.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
- name: cache
  mountPath: /cache
{{- if .Values.modelClaim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .Values.workers.replicas }}
- name: curve
  mountPath: /keys
{{- end }}
{{- end }}

{{/* `keys` is the name of the Secret with CURVE keys. */}}
{{- define "tokenyard.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 4Gi
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .root.Values.sharedMemory }}
- name: cache
{{- if .root.Values.cacheClaim }}
  persistentVolumeClaim:
    claimName: {{ .root.Values.cacheClaim }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- with .root.Values.modelClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- if .root.Values.workers.replicas }}
- name: curve
  emptyDir:
    medium: Memory
    sizeLimit: 1Mi
- name: curve-secret
  secret:
    secretName: {{ .keys }}
{{- end }}
{{- end }}

{{/* Kubernetes lets the group read mounted secrets; keys that others can read are refused. So they are copied. */}}
{{- define "tokenyard.copyKeys" -}}
- name: copy-keys
  {{- include "tokenyard.image" .root | nindent 2 }}
  command: [sh, -ec, {{ .script | quote }}]
  volumeMounts:
    - name: curve-secret
      mountPath: /secrets/curve
      readOnly: true
    - name: curve
      mountPath: /keys
{{- end }}
