"""The layers of a text encoder in one compiled call: several texts, one after another, whose tokens see each other."""
