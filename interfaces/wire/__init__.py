"""How values cross a process boundary: msgpack, read strictly."""
