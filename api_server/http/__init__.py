"""What the port answers before a route is found: connections, heads of requests, and pages of other origins."""
