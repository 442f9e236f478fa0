{{/* The pods of servers and workers, for Deployments and for a LeaderWorkerSet. */}}
{{- define "tokenyard.serverPod" -}}
{{- $values := .Values }}
{{- $remote := gt (int $values.workers.replicas) 0 }}
{{- $scheme := ternary "HTTPS" "HTTP" (ne $values.secrets.tls "") }}
{{- $part := dict "root" . "part" "server" }}
metadata:
  labels:
    {{- include "tokenyard.labels" $part | nindent 4 }}
spec:
  {{- include "tokenyard.pod" $part | nindent 2 }}
  # The delay takes the place of a preStop hook: requests are served as before while endpoints are removed. Six
  # seconds more are for the ends of the processes, and ten for what clients still send.
  terminationGracePeriodSeconds: {{ add $values.drain.delay $values.drain.timeout 16 }}
  {{- if $remote }}
  initContainers:
    {{- $script := "umask 077; mkdir -p /keys/peers; cp /secrets/curve/server.key_secret /keys/; cp /secrets/curve/*.key /keys/peers/" }}
    {{- include "tokenyard.copyKeys" (dict "root" . "script" $script) | nindent 4 }}
  {{- end }}
  containers:
    - name: server
      {{- include "tokenyard.image" . | nindent 6 }}
      args:
        - serve
        {{- with $values.model }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: TOKENYARD_HOST
          value: "0.0.0.0"
        - name: TOKENYARD_PORT
          value: "8000"
        - name: TOKENYARD_DRAIN_DELAY
          value: {{ $values.drain.delay | quote }}
        - name: TOKENYARD_DRAIN_TIMEOUT
          value: {{ $values.drain.timeout | quote }}
        {{- if $remote }}
        - name: TOKENYARD_DEVICES
          value: none
        - name: TOKENYARD_WORKER_ENDPOINT
          value: tcp://0.0.0.0:5600
        - name: TOKENYARD_CURVE_KEYS
          value: /keys
        {{- end }}
        {{- if $values.secrets.apiKeys }}
        - name: TOKENYARD_API_KEY_FILE
          value: /secrets/api/keys
        {{- end }}
        {{- if $values.secrets.tls }}
        - name: TOKENYARD_SSL_CERTFILE
          value: /secrets/tls/tls.crt
        - name: TOKENYARD_SSL_KEYFILE
          value: /secrets/tls/tls.key
        {{- end }}
        {{- with $values.secrets.adminKey }}
        - name: TOKENYARD_ADMIN_API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: key
        {{- end }}
        {{- include "tokenyard.environment" . | nindent 8 }}
      ports:
        - name: http
          containerPort: 8000
        {{- if $remote }}
        - name: workers
          containerPort: 5600
        {{- end }}
      startupProbe:
        httpGet:
          path: /health
          port: http
          scheme: {{ $scheme }}
        periodSeconds: 2
        failureThreshold: {{ div (add $values.startSeconds 1) 2 }}
      livenessProbe:
        httpGet:
          path: /health
          port: http
          scheme: {{ $scheme }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet:
          path: /ready
          port: http
          scheme: {{ $scheme }}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 1
      resources:
        {{- include "tokenyard.resources" (dict "resources" $values.resources "gpus" (ternary 0 $values.gpus $remote)) | nindent 8 }}
      volumeMounts:
        {{- include "tokenyard.mounts" . | nindent 8 }}
        {{- if $values.secrets.apiKeys }}
        - name: api-keys
          mountPath: /secrets/api
          readOnly: true
        {{- end }}
        {{- if $values.secrets.tls }}
        - name: tls
          mountPath: /secrets/tls
          readOnly: true
        {{- end }}
  volumes:
    {{- include "tokenyard.volumes" (dict "root" . "keys" $values.workers.serverKeys) | nindent 4 }}
    {{- with $values.secrets.apiKeys }}
    - name: api-keys
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with $values.secrets.tls }}
    - name: tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
{{- end }}

{{- define "tokenyard.workerPod" -}}
{{- $values := .Values }}
{{- $part := dict "root" . "part" "worker" }}
metadata:
  labels:
    {{- include "tokenyard.labels" $part | nindent 4 }}
spec:
  {{- include "tokenyard.pod" $part | nindent 2 }}
  # At its end the sequences go on at the other workers.
  terminationGracePeriodSeconds: 30
  initContainers:
    {{- $script := "umask 077; cp /secrets/curve/peer.key_secret /secrets/curve/server.key /keys/" }}
    {{- include "tokenyard.copyKeys" (dict "root" . "script" $script) | nindent 4 }}
  containers:
    # It has no probe: it replaces its own processes, finds its server again, and ends where it cannot go on.
    - name: worker
      {{- include "tokenyard.image" . | nindent 6 }}
      args:
        - worker
        {{- if include "tokenyard.groups" . }}
        - --index=$(LWS_WORKER_INDEX)
        - tcp://$(LWS_LEADER_ADDRESS):5600
        {{- else }}
        - tcp://{{ include "tokenyard.name" . }}-workers:5600
        {{- end }}
        {{- with $values.model }}
        - {{ . | quote }}
        {{- end }}
        {{- if include "tokenyard.nodes" . }}
        # What else there is to know of the group is in the variables of the LeaderWorkerSet.
        - --rendezvous=:5700
        {{- end }}
      env:
        - name: TOKENYARD_CURVE_KEYS
          value: /keys
        {{- if gt (int $values.workers.gpus) 1 }}
        # One worker of all of them.
        - name: TOKENYARD_DEVICES
          value: cuda:0{{ range $gpu := untilStep 1 (int $values.workers.gpus) 1 }}+cuda:{{ $gpu }}{{ end }}
        {{- end }}
        {{- include "tokenyard.environment" . | nindent 8 }}
      resources:
        {{- include "tokenyard.resources" (dict "resources" $values.workers.resources "gpus" $values.workers.gpus) | nindent 8 }}
      volumeMounts:
        {{- include "tokenyard.mounts" . | nindent 8 }}
  volumes:
    {{- include "tokenyard.volumes" (dict "root" . "keys" $values.workers.peerKeys) | nindent 4 }}
{{- end }}
