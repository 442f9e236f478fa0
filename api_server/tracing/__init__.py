"""Traces of requests for OpenTelemetry: made when a request has ended, of what is known by then.

names.py has the attributes' names, records.py what is kept of a request, spans.py makes spans of it, exporter.py sends
them in the threads of daemon_call.py, library_log.py takes the library's own lines, middleware.py is the application
around the others, and start.py begins all of it, if an exporter is configured.
"""
