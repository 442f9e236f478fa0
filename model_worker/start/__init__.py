"""From settings to a model that serves: a start for models that generate, one for one-shot tasks, and the serving."""
