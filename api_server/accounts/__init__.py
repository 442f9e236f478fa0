"""What each key has used, and the limits on what it may use in a minute."""
