"""`python -m mkcompile trace`: run something with traced kernels, write and draw its timeline."""
