"""Transcripts of speech: windows of a clip, their prompts, and the segments that the model's timestamps cut."""
