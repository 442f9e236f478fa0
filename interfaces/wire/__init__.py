"""The conversion of values at a process boundary: msgpack, read strictly."""
