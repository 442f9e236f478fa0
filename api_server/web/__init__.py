"""What every HTTP request passes: access, bodies, fields, endpoints, event streams."""
