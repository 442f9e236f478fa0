"""From a checkpoint to a model that is verified."""
