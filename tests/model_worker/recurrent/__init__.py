"""Models with recurrent layers."""
