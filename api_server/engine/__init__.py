"""The scheduler as this process sees it: submissions, their updates, its health."""
