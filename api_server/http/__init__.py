"""The port below the routes: connections, heads of requests, and pages of other origins."""
