"""Speech out: sentences of a text, their sound from the model, and files of sound."""
