"""How the embedded model got eyes: pictures, questions about them, the tower's training, evaluation.

The text model stays as it is, bit for bit: the vision tower learns to put into its input what makes it answer.
"""
