"""The commands of `python -m mkcompile`, one module each."""
