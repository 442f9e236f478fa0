"""The path of every HTTP request: access, bodies, fields, endpoints, event streams."""
