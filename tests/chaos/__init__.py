"""What happens to clients when processes are killed, stopped, flooded and lied to. `make chaos` runs the long form."""
