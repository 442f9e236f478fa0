"""The `tokenyard` command: starts the other folders as processes, watches over them, and talks to a running server."""
