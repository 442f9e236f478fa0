"""The JSON body of a request: its weight, its parsing, and its limits."""
