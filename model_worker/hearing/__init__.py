"""Speech recognition: the encoder of clips, and the rules of a transcript."""
