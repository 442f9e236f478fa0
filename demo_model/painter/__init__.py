"""How a small painter is made: scenes and the words for them, drawings, models, training, and a judge.

It is a Stable Diffusion of 64 x 64 pixels that learnt drawings of a script, and no picture is downloaded.
"""
