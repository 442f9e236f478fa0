"""A request as the scheduler and the workers know it."""
