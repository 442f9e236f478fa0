"""The JSON body of a request: what it weighs, how it is read, and what it may hold."""
