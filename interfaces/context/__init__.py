"""The state of a request, as the scheduler and the workers share it."""
