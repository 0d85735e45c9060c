"""What will be fused, why or why not, what it gains, and what this machine can do. Nothing imports this room."""
