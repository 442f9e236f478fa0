"""Drafters guess the tokens that follow, and a pass verifies the guesses of all rows at once.

text     `own_text.py`: what followed the same words earlier in the sequence
suffix   `suffix.py`: what followed them in answers that have ended
model    `draft_model.py`: what a smaller model draws
eagle3   `eagle3.py`: what a layer draws that reads residuals of the served model

`several.py` asks them all; `budget.py` says how many guesses pay.
"""
